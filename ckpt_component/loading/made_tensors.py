"""Match the tensors of a target that are made of tensors with those of a checkpoint.

Their classes are the target's: a load fills what they are made of, and runs nothing that a checkpoint names. What a
checkpoint says of a class is only compared. The state of an optimizer that never stepped has no such tensors yet, so
the optimizer makes them, from copies of its parameters.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import CheckpointLoadError
from ..formats.source import Source
from ..state.compare import same_value
from ..state.flatten import FlatState, flatten
from ..state.parameter_names import optimizers_of
from ..state.paths import CONTEXT, Path, key_of, keys_of
from ..state.shards import read_context
from .mismatch import Misfit, Mismatches


def match_made_tensors(
    flat: FlatState, source: Source, mismatches: Mismatches, copy_of: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[FlatState, Source]:
    """Compare the tensors made of tensors, and add those that optimizers have not made yet.

    Args:
        flat: the target
        source: the checkpoint
        mismatches: gets those that do not fit
        copy_of: returns a copy of a parameter, with memory

    Returns:
        The target, and the checkpoint, without what they say of the classes: only tensors are left to fill.

    Raises:
        CheckpointLoadError: an optimizer cannot make its state
    """
    objects = source.contents.objects
    stored = {entry.path[:-1]: key for key, entry in objects.items() if entry.path[-1] == CONTEXT}
    missing = _MissingTensors(flat, source, copy_of)
    known = {key_of(path[:-1]) for path in flat.object_paths if path[-1] == CONTEXT}
    for path, key in stored.items():
        within_another = any(path[:depth] in stored for depth in range(1, len(path)))
        if key_of(path) not in known and not within_another:
            try:
                missing.make(path, key)
            except Misfit as misfit:
                mismatches.add(misfit)
    flat = missing.added_to(flat)
    depths = {len(path) for path in flat.made}
    contexts = {
        path: value
        for path, value in zip(flat.object_paths, flat.objects, strict=True)
        if path[-1] == CONTEXT and any(path[:depth] in flat.made for depth in depths)
    }
    found = source.read_objects([key for key in map(key_of, contexts) if key in objects])
    for path, context in contexts.items():
        difference = _difference(key_of(path[:-1]), context, found.get(key_of(path)), source)
        if difference is not None:
            mismatches.add(difference)
    source = copy.copy(source)
    left = {key: entry for key, entry in objects.items() if key not in found}
    source.contents = replace(source.contents, objects=left)
    return flat.only(lambda path: path not in contexts), source


def whole_values(values: Mapping[Path, Any], made: Mapping[Path, torch.Tensor]) -> dict[Path, Any]:
    """Values by path, in which tensors stand for those that they are made of."""
    depths = sorted({len(path) for path in made})
    whole: dict[Path, Any] = {}
    for path, value in values.items():
        around = next((path[:depth] for depth in depths if path[:depth] in made), None)
        whole[path if around is None else around] = value if around is None else made[around]
    return whole


class _MissingTensors:
    """The tensors made of tensors that a checkpoint has, and the target does not have yet.

    Args:
        flat: the target
        source: the checkpoint
        copy_of: as for `match_made_tensors`
    """

    def __init__(self, flat: FlatState, source: Source, copy_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._source = source
        self._copy_of = copy_of
        self._tensors = {*keys_of(flat.tensor_paths)}
        self._optimizers = optimizers_of(flat)
        self._stateful = [(key_of(path), stateful) for path, stateful in flat.stateful]
        #: State of parameters, by path of their optimizer and number.
        self._states: dict[tuple[Path, int], Any] = {}
        self._made: dict[Path, torch.Tensor] = {}

    def make(self, path: Path, context: str) -> None:
        """Have an optimizer make a tensor. Where the target has no object, any value may be, and none is made.

        Args:
            path: path of the tensor in the checkpoint
            context: key of what it is

        Raises:
            Misfit: the target has something else there
            CheckpointLoadError: see `match_made_tensors`
        """
        key = key_of(path)
        if key in self._tensors:
            fact = f"'{key}' is a plain tensor in the target, and made of tensors in the checkpoint"
            stored = read_context(self._source.read_objects([context])[context]) or {}
            advice = "make the target as it was when it was saved, such as by quantizing it first"
            raise Misfit(key, f"{fact} ({stored.get('class')!s:.200})", advice)
        for place, optimizer in self._optimizers:
            beginning, number, inner = path[: len(place) + 1], path[len(place) + 1 :][:1], path[len(place) + 2 :]
            if key_of(beginning) == key_of((*place, "state")) and str(*number).isdecimal() and inner:
                value = self._state_of(place, optimizer, int(*number), inner)
                self._made[(*place, "state", int(*number), *inner)] = value
                return
        for outer, stateful in self._stateful:
            if key.startswith(f"{outer}."):
                fact = (
                    f"'{key}' in the checkpoint is made of tensors, and is not in {type(stateful).__name__} '{outer}'"
                )
                raise Misfit(key, fact, "let it make its state before the load, such as by one step")

    def _state_of(self, place: Path, optimizer: torch.optim.Optimizer, number: int, inner: Path) -> torch.Tensor:
        """A value of the state that an optimizer makes for a parameter.

        Raises:
            Misfit: it is not made of tensors
            CheckpointLoadError: the optimizer makes none
        """
        key, kind = key_of((*place, "state", number, *inner)), type(optimizer).__name__
        try:
            if (place, number) not in self._states:
                self._states[place, number] = _state_after_a_step(optimizer, number, self._copy_of)
            value = self._states[place, number]
            for name in inner:
                value = value[name]
        except Exception as error:  # the code of an optimizer may raise anything
            raise CheckpointLoadError(
                f"'{key}' in the checkpoint is made of tensors, and {kind} could not make its state before the first "
                f"step ({type(error).__name__}: {str(error).rstrip('. ')}); take one step before the load."
            ) from error
        if not isinstance(value, torch.Tensor) or not flatten({"": value}).made:
            fact = f"'{key}' in the checkpoint is made of tensors, and is a {type(value).__name__} in {kind}"
            raise Misfit(key, fact, "use the optimizer that it was saved with")
        return value

    def added_to(self, flat: FlatState) -> FlatState:
        """The target with the tensors that were made."""
        if not self._made:
            return flat
        places, first = [*self._made], len(flat.tensors)
        more = flatten({str(number): self._made[place] for number, place in enumerate(places)})

        def placed(path: Path) -> Path:
            return (*places[int(path[0])], *path[1:])

        return replace(
            flat,
            tensors=[*flat.tensors, *more.tensors],
            tensor_paths=[*flat.tensor_paths, *map(placed, more.tensor_paths)],
            objects=[*flat.objects, *more.objects],
            object_paths=[*flat.object_paths, *map(placed, more.object_paths)],
            shards=[*flat.shards, *more.shards],
            placed={**flat.placed, **{first + number: whole for number, whole in more.placed.items()}},
            made={**flat.made, **{placed(path): whole for path, whole in more.made.items()}},
        )


def _state_after_a_step(
    optimizer: torch.optim.Optimizer, number: int, copy_of: Callable[[torch.Tensor], torch.Tensor]
) -> Mapping[Any, Any]:
    """The state of one parameter after a step with a gradient of zeros, of which a load overwrites each value.

    The step is that of a copy of the optimizer, without hooks, on a copy of the parameter. The optimizer, its options,
    its parameters and the default random generators stay as they are.

    Raises:
        TypeError: the copy could change what it is not a copy of
    """
    while "param_groups" not in vars(optimizer):  # a wrapper that hands on all, such as Accelerate's
        optimizer = vars(optimizer)["optimizer"]
    _refuse_other_parameters(optimizer)
    groups = [(group, each) for group in optimizer.param_groups for each in group["params"]]
    group, parameter = groups[number]
    with torch.enable_grad():
        single = copy_of(parameter).requires_grad_()
    single.grad = torch.zeros_like(single)
    options = {name: _copied(value) for name, value in group.items() if name != "params"}
    own = {"state": defaultdict(dict), "param_groups": [{**options, "params": [single]}]}
    hooks: dict[str, Any] = {f"_optimizer_step_{when}_hooks": OrderedDict() for when in ("pre", "post")}
    stepping = object.__new__(type(optimizer))
    vars(stepping).update({**vars(optimizer), **own, **hooks})
    vars(stepping).pop("step", None)  # a scheduler puts one on the instance, which is bound to it
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # torch's wrapper, which calls the hooks of all optimizers
        step = step.__wrapped__  # type: ignore[attr-defined]
    devices = [single.device] if single.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        step(stepping)
    state: Mapping[Any, Any] = stepping.state[single]
    return state


def _refuse_other_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that steps another one, or that has its parameters in an attribute, by `TypeError`."""
    live = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for name, value in vars(optimizer).items():
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        if name not in ("state", "param_groups") and any(
            id(each) in live or isinstance(each, torch.optim.Optimizer) for each in inner
        ):
            raise TypeError(f"its attribute '{name}' leads to parameters that a step would change")


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _difference(key: str, context: Any, stored: Any, source: Source) -> Misfit | None:
    """How a tensor differs from that of the checkpoint beside its parts; None: it does not, or nothing says so."""
    advice = "make the target as it was when it was saved"
    own, theirs = dict(context), read_context(stored)
    name = own["class"]
    if stored is None:
        kinds = {"tensor": source.contents.tensors, "Python object": source.contents.objects}
        kind = next((kind for kind, entries in kinds.items() if key in entries), None)
        if kind is None:
            return None  # a file of safetensors has the parts only; without those, they are missing
        fact = f"'{key}' is a {name}, made of tensors, in the target and a {kind} in the checkpoint"
        return Misfit(key, fact, advice)
    if theirs is None:
        return Misfit(key, f"what '{key}' is made of is a {type(stored).__name__} in the checkpoint", advice)
    for what in ("class", "shape", "dtype", "context"):
        one, other = own[what], theirs.get(what)
        if what == "class":  # modules are moved from release to release
            one, other = name.rpartition(".")[2], str(other).rpartition(".")[2]
        if not same_value(one, other):
            fact = f"'{key}' ({name}) has the {what} {one!r:.200} in the target and {other!r:.200} in the checkpoint"
            return Misfit(key, fact, advice)
    return None
