"""Compare the structure of a target with that of a checkpoint, and report mismatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..errors import CheckpointLoadError
from ..formats.source import Source
from ..state.flatten import StateDict, Stateful, kind_of
from ..state.paths import Path, PerRank, key_of, keys_of, rank_name, rank_of
from .collective import CollectiveLoad
from .mismatch import Misfit

_NOTHING = object()


class Kinds:
    """Compares the kinds of the values of a target with those of a checkpoint.

    A plain value of the target accepts any kind. A dict, list, tuple, set, tensor or stateful object accepts only its
    own kind. Each object checks its own state.

    Args:
        state_dict: the target
        stateful: its stateful objects with their paths, in traversal order
        owners: the rank whose value each `PerRank` takes, by path
        source: the checkpoint

    Attributes:
        objects: objects to restore, by path. An outer object restores those inside its own state.
        lists: keys of lists in the checkpoint
    """

    def __init__(
        self,
        state_dict: StateDict,
        stateful: Sequence[tuple[Path, Stateful]],
        owners: Mapping[Path, int | None],
        source: Source,
    ) -> None:
        self._state_dict = state_dict
        self._owners = owners
        self._source = source
        self.objects: dict[Path, Stateful] = {}
        for path, value in stateful:
            if self.object_around(path) is None:
                self.objects[path] = value
        self.lists = set(keys_of([path for path, kind in source.contents.containers if kind == "list"]))

    @cached_property
    def below(self) -> dict[str, list[str]]:
        """The keys below every dict and list of the checkpoint, by the container's key."""
        below: dict[str, list[str]] = {}
        contents = self._source.contents
        nodes: dict[Path, list[list[str]]] = {}  # path of a container -> the lists that its keys are added to
        for key, path in contents.paths():
            parent = path[:-1]
            if parent not in nodes:
                nodes[parent] = [below.setdefault(node, []) for node in _keys_along(parent)]
            for keys in nodes[parent]:
                keys.append(key)
        for path, kind in contents.containers:
            if kind == "empty" and path:
                below.setdefault(key_of(path), [])
        return below

    def object_around(self, path: Path) -> Path | None:
        """The path of the target's object whose state contains `path`; an object's own path counts."""
        if self.objects:
            for depth in range(1, len(path) + 1):
                if path[:depth] in self.objects:
                    return path[:depth]
        return None

    def check(self, path: Path) -> None:
        """Refuse a different kind at a path of the target, as far as the index shows it; see `compare`.

        Raises:
            Misfit: the kinds differ; names the key
        """
        key = key_of(path)
        there = None
        if key in self._source.contents.tensors:
            there = "tensor"
        elif key in self.lists:
            there = "list"
        elif key not in self._source.contents.objects and key in self.below:
            there = "dict"
        if there is not None and binding_kind(self._target_value(path)) not in (None, there):
            raise self._mismatch(path, there)

    def stored_object_above(self, path: Path) -> Path | None:
        """The path of the checkpoint's object that may contain a path of the target, or None.

        Raises:
            Misfit: the checkpoint has a tensor there
        """
        contents, around = self._source.contents, self.object_around(path)
        keys = _keys_along(path)
        for depth in range(len(path) - 1, 0, -1):
            if keys[depth - 1] in contents.objects:
                return path[:depth]
            if keys[depth - 1] in contents.tensors and (around is None or depth <= len(around)):
                raise self._mismatch(path[:depth], "tensor")
        return None

    def compare(self, path: Path, above: Path, value: Any) -> tuple[bool, Any]:
        """Compare the target at a path with an object that was read.

        Args:
            path: path in the target
            above: path of the object
            value: the object

        Returns:
            Whether the object has a value for the path, and that value.

        Raises:
            Misfit: the kinds differ at the path or between the object and it
        """
        around = self.object_around(path)
        for depth in range(len(above), len(path) + 1):
            here = binding_kind(self._target_value(path[:depth]))
            outside = around is None or depth <= len(around)
            if outside and value is not None and here not in (None, binding_kind(value)):  # None counts as absent
                raise self._mismatch(path[:depth], type(value).__name__)
            if depth == len(path):
                return value is not None or here != "tensor", value
            if not isinstance(value, (Mapping, list, tuple)):
                break
            try:
                value = value[path[depth]]
            except (KeyError, IndexError, TypeError):
                break
        return False, None

    def own_tuple(self, path: Path) -> tuple[Any, ...] | None:
        """The target's tuple at a path outside of its objects' states, each of which checks its own; None: no tuple."""
        value = None if self.object_around(path) else self._target_value(path)
        return value if type(value) is tuple else None

    def _target_value(self, path: Path) -> Any:
        """The target's value at a path outside of its objects' states."""
        value: Any = self._state_dict
        for depth, part in enumerate(path):
            if isinstance(value, PerRank):
                owner = self._owners.get(path[:depth])
                if owner is None or part != rank_name(owner):
                    return _NOTHING
                value = value.value
                continue
            # Stock DCP turns every dict key into a string.
            for name in (part, int(part)) if isinstance(part, str) and part.isdecimal() else (part,):
                in_list = isinstance(value, list) and type(name) is int and 0 <= name < len(value)
                if in_list or (kind_of(value) == "dict" and name in value):
                    value = value[name]
                    break
            else:
                return _NOTHING
        return value

    def _mismatch(self, path: Path, there: str) -> Misfit:
        value = self._target_value(path)
        here = binding_kind(value)
        here = type(value).__name__ if here in (None, "dict") else here
        return Misfit.of_kind(key_of(path), here, there)


def _keys_along(path: Path) -> list[str]:
    """The keys, as by `key_of`, of all prefixes of a path, from the outermost to the path itself."""
    keys: list[str] = []
    for part in path:
        keys.append(f"{keys[-1]}.{part}" if keys else str(part))
    return keys


def binding_kind(value: Any) -> str | None:
    """The kind of a value that accepts only its own kind; None for a plain value."""
    kind = kind_of(value)
    if kind in ("tensor", "list"):
        return kind
    if kind in ("dict", "stateful", "generator"):  # the state of an object is a dict
        return "dict"
    return type(value).__name__ if type(value) in (list, tuple, set) else None


def owner_of(path: Path, per_rank: PerRank, source: Source, rank: int, world_size: int) -> int | None:
    """The rank whose value to load: this rank's, or for another number of ranks rank 0's or None, by `when_resized`."""
    depth = len(path)
    names = {place[depth] for _, place in source.contents.paths() if place[:depth] == path and len(place) > depth}
    saved = {number for number in map(rank_of, names) if number is not None}
    if not saved or (len(saved) == world_size and rank in saved):
        return rank
    if per_rank.when_resized == "error":
        raise CheckpointLoadError(
            f"'{key_of(path)}' differs by rank; {source.where} has it for {len(saved)} ranks, and there are "
            f"{world_size} now. PerRank(..., when_resized='keep') keeps the current value, 'first' takes rank 0's."
        )
    return None if per_rank.when_resized == "keep" else min(saved)


@dataclass(frozen=True)
class LoadOptions:
    """What a load does with a checkpoint and its target.

    Attributes:
        map_location: a device, dict or function as for `torch.load`, for tensors that have no target
        strict: refuse a checkpoint that lacks keys of the target
        allow_dtype_cast: convert values to the dtype of the target tensor
        allow_unexpected: ignore keys of the checkpoint that the target lacks; False: refuse them
        resuming: a run resumes from this checkpoint; it is verified with `verify: on_resume`
        rename: as for `KeyMap`
        prefix: as for `KeyMap`
        ignore: as for `KeyMap`
        modules: those whose tensors are in a target that is a dict of a module's state
        narrow: returns the part of the checkpoint that the target is compared with, under its new keys; None: all
        manifest: that of the checkpoint, if it was read already
        attempt: whose manifest to take, where hosts may have those of several; empty: there is one
        alone: this rank loads by itself, and agrees on nothing with others
        part_of: the load of all ranks that this is a part of, and which has its phases; None: it has its own
        tag: names what ranks agree on; None: they have not met for this load yet
        visible: seconds to wait for a checkpoint that another rank has seen; None: it is there, or there is none
    """

    map_location: Any = None
    strict: bool = False
    allow_dtype_cast: bool = False
    allow_unexpected: bool = True
    resuming: bool = False
    rename: Mapping[str, str] | None = None
    prefix: str = ""
    ignore: Sequence[str] = ()
    modules: Sequence[torch.nn.Module] = ()
    narrow: Callable[[Source], Source] | None = None
    manifest: Mapping[str, Any] | None = None
    attempt: str = ""
    alone: bool = False
    part_of: CollectiveLoad | None = None
    tag: str | None = None
    visible: float | None = None
