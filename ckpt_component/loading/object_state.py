"""The state to load into an object of the target, from its own values and those of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import CheckpointLoadError
from ..state.flatten import FlatState, StateDict, Stateful, unflatten
from ..state.paths import Path, key_of
from ..state.wrapped_modules import QUANTIZED_MARKS, without_parts
from .kinds import Kinds
from .made_tensors import whole_values
from .optimizer_values import options_of, put_back, replaced_options
from .own_dicts import in_own_classes
from .proof import Proof

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
        state.setdefault("state", {})  # there is none of the parameters that it has now
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
