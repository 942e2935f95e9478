"""Whether what stands in a target and what stands in a checkpoint under one key are of the same form."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import torch

from ..errors import CheckpointLoadError
from ..state.flatten import FlatState, Path, StateDict, is_dict, is_stateful, key_of
from ..state.per_rank import PerRank, rank_name, rank_of
from .source import Source

_NOTHING = object()


class Forms:
    """What both hold where, and the errors for what does not fit.

    A plain value of the target takes anything. A dict, list, tuple, set or tensor, or an object that is given its
    state, takes its like alone. The state of an object is that object's own business.

    Args:
        state_dict: the target.
        flat: the same, flattened.
        source: the checkpoint.
        objects: where the target's objects with a state stand, the outer ones alone.
        owners: whose value each `PerRank` takes, by its path.
    """

    def __init__(
        self,
        state_dict: StateDict,
        flat: FlatState,
        source: Source,
        objects: Collection[Path],
        owners: Mapping[Path, int | None],
    ) -> None:
        self._state_dict = state_dict
        self._flat = flat
        self._source = source
        self._objects = frozenset(objects)
        self._owners = owners
        containers = source.index.containers
        self._lists = {key_of(path) for path, kind in containers if kind == "list"}
        #: Keys of empty dicts of the checkpoint.
        self.empty = {key_of(path) for path, kind in containers if kind == "empty" and path}

    @cached_property
    def below(self) -> dict[str, list[str]]:
        """For every inner node of the checkpoint, the keys below it."""
        index, found = self._source.index, dict[str, list[str]]()
        nodes: dict[Path, list[list[str]]] = {}  # by the path of a container: the lists that its keys belong to
        for key, path in [*((key, entry.path) for key, entry in index.tensors.items()), *index.objects.items()]:
            around = path[:-1]
            lists = nodes.get(around)
            if lists is None:
                names = [key_of(around[:depth]) for depth in range(1, len(around) + 1)]
                lists = nodes[around] = [found.setdefault(name, []) for name in names]
            for keys in lists:
                keys.append(key)
        return found

    def owner(self, path: Path) -> Path | None:
        """The place of the target's object whose state a path is in."""
        return next((path[:depth] for depth in range(1, len(path) + 1) if path[:depth] in self._objects), None)

    def has_list(self, path: Path) -> bool:
        """Whether the checkpoint has a list of values at a place."""
        return key_of(path) in self._lists

    def has_container(self, path: Path) -> bool:
        """Whether the checkpoint has a dict or a list of values at a place."""
        key = key_of(path)
        return key in self.empty or key in self.below

    def check_containers(self) -> None:
        """Refuse a list of the one where the other has something else, and what has no state where an object stands."""
        for path, kind in self._flat.containers:
            if kind == "list" and self.owner(path) is None:
                self.check(path)
        for path, kind in self._source.index.containers:
            if kind != "odict" and self.owner(path) is None:
                self.check(path)
        for path in self._objects:
            self.check(path)

    def check(self, path: Path) -> None:
        """Refuse another form at a place of the target, as far as it is known without reading; see `compare`."""
        there, key = None, key_of(path)
        if key in self._source.index.tensors:
            there = "tensor"
        elif key in self._lists:
            there = "list"
        elif key in self.empty or (key not in self._source.index.objects and key in self.below):
            there = "dict"
        if there is not None and _form(self._here(path)) not in (None, there):
            raise self._unlike(path, there)

    def compare(self, path: Path, value: Any) -> None:
        """Refuse another form at a place of the target than that of an object that was read. None is as nothing."""
        if value is not None and _form(self._here(path)) not in (None, _form(value)):
            raise self._unlike(path, type(value).__name__)

    def object_above(self, path: Path) -> Path | None:
        """Where an object of the checkpoint stands that a place of the target may be inside of.

        Raises:
            CheckpointLoadError: there is a tensor.
        """
        index, owner = self._source.index, self.owner(path)
        for depth in range(len(path) - 1, 0, -1):
            above = key_of(path[:depth])
            if above in index.objects:
                return path[:depth]
            if above in index.tensors and (owner is None or depth <= len(owner)):
                raise self._unlike(path[:depth], "tensor")
        return None

    def descend(self, path: Path, above: Path, value: Any) -> tuple[bool, Any]:
        """What an object of the checkpoint has for a place of the target; (False, None) where it has nothing.

        Args:
            path: of the target.
            above: where the object stands.
            value: the object.

        Raises:
            CheckpointLoadError: it is of another form on the way.
        """
        owner = self.owner(path)
        for depth in range(len(above), len(path) + 1):
            if owner is None or depth <= len(owner):
                self.compare(path[:depth], value)
            if depth == len(path):
                return value is not None or _form(self._here(path)) != "tensor", value
            if not isinstance(value, (Mapping, list, tuple)):
                break
            try:
                value = value[path[depth]]
            except (KeyError, IndexError, TypeError):
                break
        return False, None

    def _here(self, path: Path) -> Any:
        """What the target has at a place, outside of the state of its objects."""
        value: Any = self._state_dict
        for depth, part in enumerate(path):
            if isinstance(value, PerRank):
                owner = self._owners.get(path[:depth])
                if owner is None or part != rank_name(owner):
                    return _NOTHING
                value = value.value
                continue
            # Stock DCP turns every dict key into text.
            parts = (part, int(part)) if isinstance(part, str) and part.isdecimal() else (part,)
            if is_dict(value):
                found = [each for each in parts if each in value]
            elif isinstance(value, list):
                found = [each for each in parts if type(each) is int and 0 <= each < len(value)]
            else:
                return _NOTHING
            if not found:
                return _NOTHING
            value = value[found[0]]
        return value

    def _unlike(self, path: Path, there: str) -> CheckpointLoadError:
        here = _form(self._here(path))
        here = type(self._here(path)).__name__ if here in (None, "dict") else here
        return CheckpointLoadError(
            f"'{key_of(path)}' is of type {here} in the target and of type {there} in the checkpoint "
            f"{self._source.where}; give a target of that form, or None to take what the checkpoint has."
        )


def _form(value: Any) -> str | None:
    """What takes its like alone; None for a plain value."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if is_dict(value) or is_stateful(value):  # the state of an object is a dict
        return "dict"
    if isinstance(value, list):
        return "list"
    return type(value).__name__ if type(value) in (tuple, set) else None


def owner_of(path: Path, own: PerRank, source: Source, rank: int, world_size: int) -> int | None:
    """Whose value a rank takes: its own, that of rank 0, or none, when the checkpoint is of another number of ranks."""
    depth = len(path)
    saved = {
        found
        for place in [*(entry.path for entry in source.index.tensors.values()), *source.index.objects.values()]
        if place[:depth] == path and len(place) > depth and (found := rank_of(place[depth])) is not None
    }
    if not saved or (len(saved) == world_size and rank in saved):
        return rank
    if own.when_resized == "error":
        raise CheckpointLoadError(
            f"'{key_of(path)}' is every rank's own; {source.where} has it of {len(saved)} ranks, and there are "
            f"{world_size} now. PerRank(..., when_resized='keep') leaves it as it is, 'first' takes that of rank 0."
        )
    return None if own.when_resized == "keep" else min(saved)
