"""Whether what a target and a checkpoint have under one key are of the same form."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import torch

from ..errors import CheckpointLoadError
from ..state.flatten import Path, StateDict, is_dict, is_stateful, key_of
from ..state.per_rank import PerRank, rank_name, rank_of
from .source import Source

_NOTHING = object()


class Forms:
    """What a target and a checkpoint have where, and the errors for what does not fit.

    A plain value of the target takes anything. A dict, list, tuple, set or tensor, or an object that is given its
    state, takes its like alone. The state of an object is that object's own business.

    Args:
        state_dict: the target.
        source: the checkpoint.
        objects: where the target's objects with a state stand, the outer ones alone.
        owners: whose value each `PerRank` takes, by its path.

    Attributes:
        lists: keys of lists of the checkpoint.
        empty: keys of empty dicts of the checkpoint.
    """

    def __init__(
        self, state_dict: StateDict, source: Source, objects: Collection[Path], owners: Mapping[Path, int | None]
    ) -> None:
        self._state_dict = state_dict
        self._source = source
        self._objects = frozenset(objects)
        self._owners = owners
        containers = source.index.containers
        self.lists = {key_of(path) for path, kind in containers if kind == "list"}
        self.empty = {key_of(path) for path, kind in containers if kind == "empty" and path}

    @cached_property
    def below(self) -> dict[str, list[str]]:
        """For every inner node of the checkpoint, the keys below it."""
        below: dict[str, list[str]] = {}
        nodes: dict[Path, list[list[str]]] = {}  # by the path of a container: the lists that its keys belong to
        for key, path in self._source.index.paths():
            parent = path[:-1]
            if parent not in nodes:
                nodes[parent] = [below.setdefault(key_of(parent[:depth]), []) for depth in range(1, len(path))]
            for keys in nodes[parent]:
                keys.append(key)
        return below

    def owner(self, path: Path) -> Path | None:
        """The place of the target's object whose state a path is in."""
        if self._objects:
            for depth in range(1, len(path) + 1):
                if path[:depth] in self._objects:
                    return path[:depth]
        return None

    def has_container(self, path: Path) -> bool:
        """Whether the checkpoint has a dict or a list of values at a place."""
        key = key_of(path)
        return key in self.empty or key in self.below

    def check(self, path: Path) -> None:
        """Refuse another form at a place of the target, as far as it is known without reading; see `compare`.

        Raises:
            CheckpointLoadError: with the key.
        """
        there, key = None, key_of(path)
        if key in self._source.index.tensors:
            there = "tensor"
        elif key in self.lists:
            there = "list"
        elif key in self.empty or (key not in self._source.index.objects and key in self.below):
            there = "dict"
        if there is not None and _form(self._target_value(path)) not in (None, there):
            raise self._mismatch(path, there)

    def object_above(self, path: Path) -> Path | None:
        """Where an object of the checkpoint stands that a place of the target may be inside of.

        Raises:
            CheckpointLoadError: a tensor stands there.
        """
        index, owner = self._source.index, self.owner(path)
        for depth in range(len(path) - 1, 0, -1):
            above = key_of(path[:depth])
            if above in index.objects:
                return path[:depth]
            if above in index.tensors and (owner is None or depth <= len(owner)):
                raise self._mismatch(path[:depth], "tensor")
        return None

    def compare(self, path: Path, above: Path, value: Any) -> tuple[bool, Any]:
        """Compare a place of the target with an object that was read.

        Args:
            path: of the target.
            above: where the object stands.
            value: the object.

        Returns:
            Whether the object has something for the place, and what.

        Raises:
            CheckpointLoadError: it is of another form, there or on the way.
        """
        owner = self.owner(path)
        for depth in range(len(above), len(path) + 1):
            here = _form(self._target_value(path[:depth]))
            outside = owner is None or depth <= len(owner)
            if outside and value is not None and here not in (None, _form(value)):  # None is as nothing
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

    def _target_value(self, path: Path) -> Any:
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
            for name in (part, int(part)) if isinstance(part, str) and part.isdecimal() else (part,):
                in_list = isinstance(value, list) and type(name) is int and 0 <= name < len(value)
                if in_list or (is_dict(value) and name in value):
                    value = value[name]
                    break
            else:
                return _NOTHING
        return value

    def _mismatch(self, path: Path, there: str) -> CheckpointLoadError:
        value = self._target_value(path)
        here = _form(value)
        here = type(value).__name__ if here in (None, "dict") else here
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
    names = {place[depth] for _, place in source.index.paths() if place[:depth] == path and len(place) > depth}
    saved = {number for number in map(rank_of, names) if number is not None}
    if not saved or (len(saved) == world_size and rank in saved):
        return rank
    if own.when_resized == "error":
        raise CheckpointLoadError(
            f"'{key_of(path)}' is every rank's own; {source.where} has it of {len(saved)} ranks, and there are "
            f"{world_size} now. PerRank(..., when_resized='keep') leaves it as it is, 'first' takes that of rank 0."
        )
    return None if own.when_resized == "keep" else min(saved)
