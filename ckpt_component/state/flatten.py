"""A nested state dict as flat lists of tensors and objects, and back.

The rules which containers are opened are those of `torch.distributed.checkpoint` since 2.4 (dicts always; a list
when it holds a tensor, a dict or such a list; a tuple never), because stock `dcp.load` looks for the keys that these
rules give. What stock forgets is kept beside: int keys, empty dicts, `OrderedDict`.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Protocol, TypeGuard

import torch

from ..errors import CheckpointStageError
from .instead import is_config
from .objects import TAG
from .per_rank import PerRank, rank_name
from .shards import Shard, check_mesh, local_parts, mesh_of

#: The way to a value: dict keys (str, int, float, bool or None) and list positions.
Path = tuple[Any, ...]
StateDict = dict[str, Any]
#: Which rank a `PerRank` value belongs to: the same for all, or for each by its path.
Owner = int | Callable[[Path, PerRank], int | None]

#: Never a part of something: by far most of the tensors are one of these.
_WHOLE = frozenset({torch.Tensor, torch.nn.Parameter})
#: Of dict keys. What derives from them, such as an enum's or numpy's, loads as something else or not at all.
_PLAIN_KEYS = frozenset({str, int, float, bool, type(None)})
#: From so many values on a dict is looked at by columns: 0.1 us a value instead of 0.3.
_WIDE = 16


class Stateful(Protocol):
    """An object that gives its state as a dict and takes it back, such as a module or an optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state back."""
        ...


@dataclass
class FlatState:
    """A state dict, flattened.

    Attributes:
        tensors: the tensors, in the order of the walk; not copied. Of a DTensor or ShardedTensor, what this rank holds:
            several parts of one have the same path.
        tensor_paths: where each one stood.
        objects: everything else.
        object_paths: where each one stood.
        containers: (path, kind) of what a plain dict would not give back: `list`, `odict`, `empty`.
        stateful: (path, object) of the values that were asked for their state.
        shards: for every tensor which part of a whole it is; None: it is the whole.
        placed: by number, the DTensors and ShardedTensors whose local parts stand in `tensors`.
        elsewhere: those of which this rank holds nothing, by place; they do not stand in `tensors`.
        pointers: where the memory of each tensor begins; there once a `Structure` has looked at the state.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    tensor_paths: list[Path] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    object_paths: list[Path] = field(default_factory=list)
    containers: list[tuple[Path, str]] = field(default_factory=list)
    stateful: list[tuple[Path, Stateful]] = field(default_factory=list)
    shards: list[Shard | None] = field(default_factory=list)
    placed: dict[int, torch.Tensor] = field(default_factory=dict)
    elsewhere: dict[Path, torch.Tensor] = field(default_factory=dict)
    pointers: Sequence[int] = ()


def key_of(path: Path) -> str:
    """The flat key of a path, as stock DCP names it: `model.layers.0.weight`."""
    return ".".join(map(str, path))


def keys_of(paths: Sequence[Path]) -> list[str]:
    """The flat keys of many paths."""
    try:
        return list(map(".".join, paths))
    except TypeError:  # not all parts are text
        return list(map(key_of, paths))


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether `state_dict()` is to be called on a value."""
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)


def flatten(state_dict: Mapping[Any, Any], rank: Owner = 0, world_size: int | None = None) -> FlatState:
    """Walk a state dict; objects with `state_dict()` are asked for their state wherever they stand.

    Args:
        state_dict: what to save, or to load into.
        rank: whose it is; the name under which `PerRank` values stand. Or a function that says it of each of them, None
            to leave it out.
        world_size: how many ranks save together; None: nothing is saved.

    Raises:
        CheckpointStageError: the state is no dict or contains itself, a dict key is neither str, int, float, bool nor
            None, an object could not be given its state back, or ranks that do not save hold parts of a tensor.
    """
    if is_stateful(state_dict):
        raise CheckpointStageError(
            f"A state dict was expected and a {type(state_dict).__name__} came; give it a name: {{'model': ...}}."
        )
    if not isinstance(state_dict, Mapping) or is_config(state_dict):
        raise CheckpointStageError(f"A state dict was expected and a {type(state_dict).__name__} came.")
    flat = FlatState()
    try:
        _walk_dict((), state_dict, flat, rank)
    except RecursionError:
        raise _endless(state_dict) from None
    flat.shards = [None] * len(flat.tensors)
    if not _WHOLE.issuperset(map(type, flat.tensors)):
        _take_parts(flat, world_size)
    return flat


def _take_parts(flat: FlatState, world_size: int | None) -> None:
    """Put the parts that this rank holds in the place of tensors that are spread over ranks."""
    places = list(zip(flat.tensor_paths, flat.tensors, strict=True))
    flat.tensor_paths, flat.tensors, flat.shards = [], [], []
    known = None  # to look at a mesh takes longer than at a tensor, and there are few
    for path, tensor in places:
        held: list[tuple[torch.Tensor, Shard | None]] = [(tensor, None)]
        if type(tensor) not in _WHOLE:
            key, mesh = key_of(path), mesh_of(tensor)
            if world_size is not None and mesh is not None and mesh is not known:
                check_mesh(mesh, key, world_size)
                known = mesh
            held = local_parts(tensor, key)
        if not held:
            flat.elsewhere[path] = tensor
        for local, shard in held:
            if local is not tensor:
                flat.placed[len(flat.tensors)] = tensor
            flat.tensor_paths.append(path)
            flat.tensors.append(local)
            flat.shards.append(shard)


def _walk_dict(path: Path, mapping: Mapping[Any, Any], flat: FlatState, rank: Owner) -> None:
    if not mapping:
        flat.containers.append((path, "empty"))
    elif type(mapping) is OrderedDict:
        flat.containers.append((path, "odict"))
    tensor, tensors, paths = torch.Tensor, flat.tensors, flat.tensor_paths
    if (
        len(mapping) >= _WIDE
        and type(mapping) in (dict, OrderedDict)
        and _WHOLE.issuperset(map(type, mapping.values()))
        and set(map(type, mapping)) == {str}
    ):
        tensors += mapping.values()
        paths += zip(*map(repeat, path), mapping, strict=False)
        return
    for name, value in mapping.items():
        if type(name) not in _PLAIN_KEYS:
            raise CheckpointStageError(
                f"A key of {key_of(path) or 'the state dict'} is the {type(name).__name__} {name!r}; "
                "use str or int keys."
            )
        if isinstance(value, tensor):
            tensors.append(value)
            paths.append((*path, name))
        else:
            _walk((*path, name), value, flat, rank)


def _walk(path: Path, value: Any, flat: FlatState, rank: Owner) -> None:
    if isinstance(value, torch.Tensor):
        flat.tensors.append(value)
        flat.tensor_paths.append(path)
    elif isinstance(value, PerRank):
        if _is_inside_object(path, flat):
            raise CheckpointStageError(
                f"'{key_of(path)}' is a PerRank in an object's state_dict(), and load_state_dict would not get it back "
                "as it was; wrap the object instead: PerRank(object)."
            )
        owner = rank if isinstance(rank, int) else rank(path, value)
        if owner is not None:
            _walk((*path, rank_name(owner)), value.value, flat, rank)
    elif is_dict(value):
        _walk_dict(path, value, flat, rank)
    elif isinstance(value, list) and _is_opened(value):
        flat.containers.append((path, "list"))
        for position, element in enumerate(value):
            _walk((*path, position), element, flat, rank)
    elif is_stateful(value):
        state = value.state_dict()
        if not _can_be_given_back(value, state):
            _check_inside(path, value, state, flat)
        flat.stateful.append((path, value))
        _walk(path, state, flat, rank)
    else:
        flat.objects.append(value)
        flat.object_paths.append(path)


def is_dict(value: Any) -> TypeGuard[Mapping[Any, Any]]:
    """Whether a value is taken apart by key; an encoded numpy value and a config are one thing each."""
    if type(value) is dict:
        return TAG not in value
    return isinstance(value, Mapping) and TAG not in value and not is_config(value)


def _is_opened(values: list[Any]) -> bool:
    return any(
        isinstance(value, (torch.Tensor, PerRank))
        or is_dict(value)
        or (isinstance(value, list) and _is_opened(value))
        or is_stateful(value)
        for value in values
    )


def _can_be_given_back(value: Stateful, state: object) -> bool:
    return isinstance(state, Mapping) and callable(getattr(value, "load_state_dict", None))


def _is_inside_object(path: Path, flat: FlatState) -> bool:
    """Whether a path that is just being walked is in the state of an object."""
    return any(path[: len(around)] == around for around, _ in flat.stateful)


def _check_inside(path: Path, value: Stateful, state: object, flat: FlatState) -> None:
    """Refuse an object that a load could not give its state back, unless the object around it does that."""
    if _is_inside_object(path, flat):
        return
    key, kind = key_of(path), type(value).__name__
    if isinstance(state, Mapping):
        raise CheckpointStageError(
            f"'{key}' is a {kind}, which has state_dict() and no load_state_dict(), so no load could give it back; "
            "define load_state_dict, or save what its state_dict() returns."
        )
    raise CheckpointStageError(
        f"'{key}' is a {kind}, whose state_dict() returned a {type(state).__name__}; a dict is expected."
    )


def _endless(state_dict: Mapping[Any, Any]) -> CheckpointStageError:
    """The error for a state that is too deep to be walked through: where it contains itself, if it does."""
    waiting: list[tuple[Path, Any, tuple[Any, ...]]] = [((), state_dict, ())]
    while waiting:
        path, value, around = waiting.pop()
        if any(value is container for container in around):
            return CheckpointStageError(f"'{key_of(path)}' contains itself, which cannot be checkpointed.")
        if len(path) > sys.getrecursionlimit():
            break
        around = (*around, value)
        if isinstance(value, PerRank):
            waiting.append((path, value.value, around))
        elif isinstance(value, Mapping):
            waiting += [((*path, name), element, around) for name, element in value.items()]
        elif isinstance(value, list):
            waiting += [((*path, position), element, around) for position, element in enumerate(value)]
        elif is_stateful(value):
            waiting.append((path, value.state_dict(), around))
    return CheckpointStageError("The state dict is nested too deeply to be checkpointed; flatten it.")


def check_unique(paths: Iterable[Path]) -> None:
    """Refuse two places whose flat keys are the same text, such as `{"a.b": 1}` and `{"a": {"b": 1}}`.

    A place that comes several times is one: of a tensor of which this rank holds several parts.
    """
    paths = list(paths)
    keys = keys_of(paths)
    if len(set(keys)) == len(keys):
        return
    seen: dict[str, Path] = {}
    for path, key in zip(paths, keys, strict=True):
        if seen.setdefault(key, path) != path:
            raise CheckpointStageError(
                f"Two values get the same key '{key}': {list(seen[key])!r} and {list(path)!r}; rename one of them."
            )


def unflatten(values: Mapping[Path, Any], containers: Iterable[tuple[Path, str]]) -> StateDict:
    """The nested state dict of flat values; the inverse of `flatten`.

    Args:
        values: value by path.
        containers: as `FlatState.containers`.
    """
    kinds: dict[Path, Callable[[], Any]] = {
        path: {"list": dict, "odict": OrderedDict, "empty": dict}[kind] for path, kind in containers
    }
    root: Any = kinds.get((), dict)()
    opened: dict[Path, Any] = {(): root}

    def container(path: Path) -> Any:
        found = opened.get(path)
        if found is None:
            found = opened[path] = kinds.get(path, dict)()
            container(path[:-1])[path[-1]] = found
        return found

    for path, value in values.items():
        container(path[:-1])[path[-1]] = value
    for path in kinds:
        container(path)
    # Lists were collected as dicts by position; the deepest are turned first.
    for path in sorted((path for path, kind in containers if kind == "list"), key=len, reverse=True):
        positions = opened[path]
        container(path[:-1])[path[-1]] = [positions[position] for position in sorted(positions)]
    return root
