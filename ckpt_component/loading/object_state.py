"""The state to load into an object of the target, from its own values and those of a checkpoint."""

from __future__ import annotations

import copy
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from ..errors import CheckpointLoadError, first_keys
from ..formats.index import Contents
from ..state.compare import same_value
from ..state.flatten import FlatState, StateDict, Stateful, unflatten
from ..state.paths import Path, key_of, keys_of, lost_class
from ..state.tensors import ORDINARY
from ..state.wrapped_modules import QUANTIZED_MARKS, without_parts
from .kinds import Kinds
from .made_tensors import whole_values
from .proof import Proof

#: Options that a scheduler changes at each step, where its own start value (`initial_lr`) is the checkpoint's.
_SCHEDULED, _CYCLED = frozenset({"lr"}), frozenset({"betas", "momentum"})


def put_back(optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]) -> None:
    """Put values that torch has cast back as they were loaded.

    `Optimizer.load_state_dict` casts floating-point state to the parameter's dtype, so that float32 moments of a
    bfloat16 parameter lose half of their bits; and of a text it makes the text of a generator.

    Args:
        optimizer: it has taken the state
        state: the `state` of the state dict that it took
    """
    parameters = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    waiting: list[tuple[Any, Any]] = [
        (optimizer.state.get(parameters[number]), loaded)
        for number, loaded in state.items()
        if type(number) is int and number < len(parameters)
    ]
    while waiting:
        taken, loaded = waiting.pop()
        if not isinstance(taken, dict) or not isinstance(loaded, Mapping):
            continue
        for name, value in loaded.items():
            now = taken.get(name)
            if isinstance(value, Mapping) and isinstance(now, dict):
                waiting.append((now, value))
            elif isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
                # A tensor made of tensors may be made again with the same dtype.
                is_cast = now.dtype != value.dtype or (type(value) not in ORDINARY and not same_value(now, value))
                if is_cast and now.shape == value.shape:
                    taken[name] = value.to(now.device)
            elif name in taken and type(now) is type(value) and not same_value(now, value):
                taken[name] = value


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group, such as `lr`, as values of this moment."""
    return [
        {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


def replaced_options(key: str, optimizer: torch.optim.Optimizer, before: list[dict[str, Any]]) -> str | None:
    """What a load has replaced of the options that the script built an optimizer with, to log; None: nothing.

    Args:
        key: the optimizer's key
        optimizer: it has taken its state
        before: its options before that, from `options_of`
    """
    replaced: dict[str, dict[str, None]] = {}
    for old, new in zip(before, optimizer.param_groups, strict=False):
        moving = frozenset[str]()
        if "initial_lr" in old and same_value(old["initial_lr"], new.get("initial_lr")):
            moving = _SCHEDULED | _CYCLED if "base_momentum" in old else _SCHEDULED
        for name in old.keys() - moving:
            if name in new and not same_value(old[name], new[name]):
                text = f"{_text(old[name])} by {_text(new[name])}"
                replaced.setdefault(name, {})[text] = None
    if not replaced:
        return None
    changes = ", ".join(f"{name} {' and '.join(texts)}" for name, texts in sorted(replaced.items()))
    names = [f"{key}.param_groups.*.{name}" for name in sorted(replaced)]
    return f"'{key}': the checkpoint replaces {changes}; to keep the script's values, load with ignore={names}"


def _text(value: Any) -> str:
    return f"{value.item()!r}" if isinstance(value, torch.Tensor) and value.numel() == 1 else f"{value!r:.60}"


def emptied(flat: FlatState, contents: Contents) -> FlatState:
    """A target whose counters and defaultdicts of plain values count as empty, where the checkpoint has them.

    Their keys are data, so that all of a checkpoint's belong into them, and others do not.

    Args:
        flat: the target
        contents: the checkpoint
    """
    others = _containers_of([*flat.tensor_paths, *(path for path, _ in flat.stateful)])
    modules = tuple(f"{key_of(path)}." for path, each in flat.stateful if isinstance(each, torch.nn.Module))
    stored = _containers_of(path for _, path in contents.paths())
    stored.update(key_of(path) for path, _ in contents.containers)
    chosen = {
        path
        for path, mapping in flat.mappings.items()
        if isinstance(mapping, (Counter, defaultdict))
        and (key := key_of(path)) in stored
        and key not in others
        and not key.startswith(modules)  # a module takes no keys that it does not have
    }
    if not chosen:
        return flat
    depths = {len(path) for path in chosen}
    left = flat.only(lambda path: not any(path[:depth] in chosen for depth in depths if depth < len(path)))
    empty = [(path, "empty") for path in chosen if path in left.mappings]
    # The class of a dict is said after that it is empty.
    return replace(left, containers=[*empty, *left.containers])


def refill(mapping: MutableMapping[Any, Any], values: Mapping[Any, Any], key: str) -> None:
    """Put values into a dict of the target in place of those that it has.

    Raises:
        CheckpointLoadError: it does not take them
    """
    try:
        mapping.clear()
        mapping.update(values)
    except Exception as error:  # the methods of a class may raise anything
        raise CheckpointLoadError(
            f"'{key}' ({type(mapping).__name__}) in the target does not take its values: {str(error).rstrip('. ')}; "
            "load into a dict."
        ) from error


def in_own_classes(value: Any, path: Path, mappings: Mapping[Path, MutableMapping[Any, Any]]) -> Any:
    """The state for an object, with dicts of the classes that its own state has.

    Args:
        value: the state
        path: path of the object
        mappings: dicts of other classes in the target, by path
    """
    for place in sorted((place for place in mappings if place[: len(path)] == path), key=len, reverse=True):
        around, names = value, place[len(path) :]
        try:
            for name in names[:-1]:
                around = around[name]
            found = around[names[-1]] if names else value
        except (LookupError, TypeError):
            continue  # the checkpoint has something else there, which the object gets as it is
        if isinstance(found, Mapping) and type(found) is not type(mappings[place]):
            own = copy.copy(mappings[place])
            refill(own, found, key_of(place))
            if names:
                around[names[-1]] = own
            else:
                value = own
    return value


def plain_now(contents: Contents, new: Iterable[Path], flat: FlatState | None = None) -> str | None:
    """A sentence on the dicts that were of other classes when they were saved, and are plain now; None: there are none.

    Args:
        contents: the checkpoint
        new: paths of what is loaded without a value of the target; an empty path is the whole checkpoint
        flat: the target, or None
    """
    lost = [(path, name) for path, kind in contents.containers if (name := lost_class(kind)) is not None]
    if not lost:
        return None
    own = set[str]()
    if flat is not None:
        own = _containers_of([*flat.tensor_paths, *flat.object_paths]) | {*keys_of([*flat.mappings])}
    whole = {*new}
    around = _containers_of(whole)
    plain = [
        f"{key_of(path)} ({name})"
        for path, name in lost
        if key_of(path) not in own
        and (key_of(path) in around or any(path[:depth] in whole for depth in range(len(path) + 1)))
    ]
    if not plain:
        return None
    return f"{first_keys(plain)}: only a dict of this class in the target keeps the class, so a plain dict came back"


def _containers_of(paths: Iterable[Path]) -> set[str]:
    """The keys of all dicts and lists around paths."""
    parents = {path[:-1] for path in paths}
    return {key_of(parent[:depth]) for parent in parents for depth in range(1, len(parent) + 1)}


logger = logging.getLogger("ckpt_component.readers")


def state_of_object(
    path: Path,
    flat: FlatState,
    kinds: Kinds,
    new: Mapping[Path, Any],
    missing: set[str],
    stored_containers: Sequence[tuple[Path, str]],
) -> StateDict:
    """The state to load into an object: the checkpoint's values, and the object's own where it has none.

    It has the object's own names. Tensors of the checkpoint are already filled. Values that the checkpoint lacks are
    kept unless they are in a list that the checkpoint has, or would collide with a new value.

    Args:
        path: path of the object
        flat: the target
        kinds: compares it with the checkpoint
        new: new values by path
        missing: keys of the target that the checkpoint lacks
        stored_containers: the containers of the checkpoint

    Raises:
        TypeError: the values do not form a state
    """
    depth = len(path)
    own_lists = {place for place, kind in flat.containers if kind == "list"}
    tensors = [flat.placed.get(number, tensor) for number, tensor in enumerate(flat.tensors)]
    present = [*zip(flat.tensor_paths, tensors, strict=True), *zip(flat.object_paths, flat.objects, strict=True)]
    state: dict[Path, Any] = {}
    for place, value in [*present, *flat.elsewhere.items()]:
        if place[:depth] != path:
            continue
        if missing and (key := key_of(place)) in missing:
            around = [place[:length] for length in range(depth + 1, len(place))]
            if key in kinds.below or any(
                outer in new or (key_of(outer) in kinds.below and (outer in own_lists or key_of(outer) in kinds.lists))
                for outer in around
            ):
                continue
        state[place] = value
    state.update({place: value for place, value in new.items() if place[:depth] == path})
    if flat.made:
        state = whole_values(state, flat.made)
    containers = {place: kind for place, kind in flat.containers if kind != "list" or key_of(place) not in kinds.below}
    containers.update(stored_containers)
    kept = [
        (place, kind)
        for place, kind in containers.items()
        if place[:depth] == path
        and (kind != "empty" or place not in state)
        # A value that was loaded as a whole already has its containers.
        and not any(place[:length] in new for length in range(depth + 1, len(place) + 1))
    ]
    mappings = flat.mappings
    if flat.wrapped:
        state = {flat.own_path(place): value for place, value in state.items()}
        kept = [(flat.own_path(place), kind) for place, kind in kept]
        mappings = {flat.own_path(place): mapping for place, mapping in mappings.items()}
    loaded: StateDict = nested_value(path, state, kept)
    return in_own_classes(loaded, path, mappings) if mappings else loaded


def load_state(
    stateful: Stateful, make_state: Callable[[], StateDict], key: str, where: str, proof: Proof | None = None
) -> None:
    """Load its state into an object, and say what of an optimizer's options it replaces.

    Args:
        stateful: the object
        make_state: returns its state
        key: its key; empty: it is the whole target
        where: the checkpoint
        proof: compares what the object then gives back; None: it is not asked

    Raises:
        CheckpointLoadError: the values form no state, or the object does not take it
    """
    what = f"'{key}'" if key else "The target"
    try:
        state = make_state()
        options: list[dict[str, Any]] = []
        if isinstance(stateful, torch.optim.Optimizer):
            _fit_optimizer(stateful, state)
            options = options_of(stateful)
        elif isinstance(stateful, torch.nn.Module) and any(
            map("\n".join(map(str, state)).__contains__, QUANTIZED_MARKS)
        ):
            state = without_parts(state)
        values = state.get("state")  # an optimizer may change the dict
        expected = None if proof is None else proof.expect(stateful, state)
        stateful.load_state_dict(state)
        if isinstance(stateful, torch.optim.Optimizer) and isinstance(values, dict):
            put_back(stateful, values)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointLoadError(
            f"{what} ({type(stateful).__name__}) did not take its state from {where}: {str(error).rstrip('. ')}. "
            "Other values are loaded already; with its name in ignore, it stays as it is."
        ) from error
    if isinstance(stateful, torch.optim.Optimizer) and (replaced := replaced_options(key, stateful, options)):
        logger.warning("%s", replaced)
    if proof is not None and expected is not None:
        proof.compare(key, stateful, expected)


def takes_only_its_own_keys(stateful: Stateful) -> bool:
    """Whether an object is a module that refuses keys that its own state lacks, and has no code that drops them."""
    return isinstance(stateful, torch.nn.Module) and all(
        not module._load_state_dict_pre_hooks
        and type(module).load_state_dict is torch.nn.Module.load_state_dict
        and type(module)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        for module in stateful.modules()
    )


def new_optimizer_states(state: Any) -> dict[str, StateDict]:
    """What `state_dict()` of optimizers returned before their first step, by key, among the values of a state.

    A load fills these dicts; an optimizer has others, so nothing of it would get there.
    """
    values = state.items() if isinstance(state, dict) else ()
    return {
        key: value
        for key, value in values
        if type(value) is dict and value.keys() == {"state", "param_groups"} and not value["state"]
    }


def _fit_optimizer(optimizer: torch.optim.Optimizer, state: StateDict) -> None:
    """Have the values of a checkpoint in the form in which an optimizer takes them."""
    if "param_groups" in state:
        state.setdefault("state", {})  # it has nothing of the parameters that it has now
    if isinstance(state.get("state"), dict):
        # Its keys are numbers; stock DCP turns every key into a string.
        state["state"] = {
            int(key) if isinstance(key, str) and key.isdigit() else key: value for key, value in state["state"].items()
        }
    groups = state.get("param_groups")
    if isinstance(groups, list) and len(groups) == len(optimizer.param_groups):
        # The optimizer takes a group as it is, without those of its settings that the checkpoint lacks.
        for group, own in zip(groups, optimizer.param_groups, strict=True):
            if isinstance(group, dict):
                group.update({key: value for key, value in own.items() if key not in group and key != "params"})


def nested_value(path: Path, values: Mapping[Path, Any], containers: Sequence[tuple[Path, str]]) -> Any:
    """The nested value at a path, from values at and below it."""
    below = [(place, kind) for place, kind in containers if place[: len(path)] == path]
    nested: Any = unflatten(values, below, classes=True)
    for part in path:
        nested = nested.get(part, {})
    return nested
