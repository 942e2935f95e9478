"""Which tensors are expected to keep their values from save to save: frozen weights, the base beside an adapter.

An expectation only decides which file a tensor's bytes are in. Whether they are the same is proved at every save, by
`core/image/unchanged_files.py`, which reports those that were not.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from ..core.outside import OUTSIDE
from ..core.spelling import closest
from .flatten import FlatState
from .paths import Path, key_of
from .shards import dense_parts
from .structure import Structure

logger = logging.getLogger("ckpt_component.state")

#: Smaller tensors are not worth a place in a file of their own.
_LARGE_BYTES = 64 << 10
#: Unchanged tensors are divided among files of at least this size, so that one that changes costs little; and among
#: about `_MOST_FILES` at most.
_FILE_BYTES, _MOST_FILES = 64 << 20, 64
#: So many of the others are looked at to learn whether anything was trained.
_SAMPLE = 256
#: It is worth a new plan if this part of the bytes, and at least so many, became unchanged.
_WORTH_PART, _WORTH_BYTES = 0.01, 1 << 20

#: So many times longer a mark must be the same that did not show a change.
_UNSEEN = 8

#: A tensor in any structure: its path, and where the shard is in the whole tensor.
Name = tuple[Path, tuple[int, ...] | None]


def name_of(structure: Structure, stored: int) -> Name:
    """The name of an entry of `Structure.stored`."""
    tensor = structure.stored[stored].tensor
    shard = structure.shards[tensor]
    return structure.tensor_paths[tensor], None if shard is None else tuple(shard.offsets)


def mark_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Address and version of a tensor. They differ after a change by torch, and may stay the same after one by others.

    An inference tensor has no version: its mark equals no other.
    """
    return (tensor.data_ptr(), object() if tensor.is_inference() else tensor._version)


class UnchangedTensors:
    """Learns which tensors keep their values, from one state to the next.

    A tensor is expected to be unchanged if it is declared, if it is a parameter of a module in the state that needs no
    gradient, or if its mark did not change between two states while others' did. Each time that proves wrong, its mark
    must be the same in twice as many states before it is expected again; in eight times as many if the mark did not
    show it, or if an optimizer in the state trains it: no mark shows steps with `fused=True`, or those of DTensors.

    Args:
        declared: keys of tensors that do not change; `*` stands for any text
    """

    def __init__(self, declared: Sequence[str] = ()) -> None:
        self._declared = self._unchecked = tuple(declared)
        self._groups: list[list[Name]] = []
        self._members: set[Name] = set()
        #: The observed structure, names and numbers of its large tensors, numbers of some others, and their marks.
        self._structure: Structure | None = None
        self._large: list[tuple[Name, int]] = []
        self._others: list[int] = []
        self._marks: tuple[list[Any], list[Any]] | None = None
        #: In how many states in a row a mark was the same, and how many are needed, if more than one.
        self._same: dict[Name, int] = {}
        self._needed: dict[Name, int] = {}
        self._lock = OUTSIDE.lock()
        #: Those that have changed -> by how many times more their mark must be the same.
        self._changed: dict[Name, int] = {}

    def report_changed(self, names: Iterable[Name], unseen: Collection[Name]) -> None:
        """Take tensors out of the files of unchanged ones, at the next plan: they had other values. Thread-safe.

        Args:
            names: of the tensors
            unseen: those of them whose mark was the same
        """
        with self._lock:
            self._changed.update({name: _UNSEEN if name in unseen else 2 for name in names})

    def observe(self, structure: Structure, flat: FlatState) -> bool:
        """Compare the marks of a state with those of the last one.

        Args:
            structure: of the state; everything that this rank has
            flat: the state

        Returns:
            Whether `group` would give another result that is worth a new plan.
        """
        if structure is not self._structure:
            self._structure, self._marks = structure, None
            self._large = _large_in(structure)
            others = sorted({entry.tensor for entry in structure.stored} - {number for _, number in self._large})
            self._others = others[:: -(-len(others) // _SAMPLE) or 1]
        marks = [mark_of(flat.tensors[number]) for _, number in self._large]
        before, self._marks = self._marks, (marks, [mark_of(flat.tensors[number]) for number in self._others])
        with self._lock:
            if not self._members.isdisjoint(self._changed):
                return True
        if before is None or before == self._marks:
            return False  # nothing was trained since
        gained, total = dict[Name, int](), 0
        for (name, number), old, new in zip(self._large, before[0], marks, strict=True):
            self._same[name] = self._same.get(name, 0) + 1 if old == new else 0
            nbytes = flat.tensors[number].nbytes
            total += nbytes
            if name not in self._members and self._is_calm(name):
                gained[name] = number
        worth = max(_WORTH_PART * total, _WORTH_BYTES)
        if sum(flat.tensors[number].nbytes for number in gained.values()) < worth:
            return False
        trained = _trained_pointers(flat)
        for name in [name for name, number in gained.items() if flat.tensors[number].data_ptr() in trained]:
            self._expect_later(name, _UNSEEN)
            del gained[name]
        return sum(flat.tensors[number].nbytes for number in gained.values()) >= worth

    def group(self, structure: Structure, flat: FlatState) -> list[list[int]]:
        """Divide the tensors that are expected to be unchanged into groups, each for its own file.

        A group stays as it was, without the tensors that have changed, so that its file can be shared further on.

        Args:
            structure: what this rank stores
            flat: a state of this structure

        Returns:
            For each group, numbers of entries in `structure.stored`.
        """
        large = _large_in(structure)
        place_of = {name_of(structure, place): place for place in range(len(structure.stored))}
        with self._lock:
            changed, self._changed = self._changed, {}
        for name, times in changed.items():
            self._expect_later(name, times)
        self._check_declared(large)
        frozen = _frozen_pointers(flat)
        expected = [
            name
            for name, number in large
            if (name in self._members and name not in changed)
            or self._is_calm(name)
            or (name not in self._needed and (flat.tensors[number].data_ptr() in frozen or self._is_declared(name)))
        ]
        chosen = set(expected)
        groups = [[name for name in group if name in chosen] for group in self._groups]
        self._groups = [group for group in groups if group]
        if len(self._groups) > 2 * _MOST_FILES:
            self._groups = []
        self._members = {name for group in self._groups for name in group}
        number_of = dict(large)
        total = sum(flat.tensors[number_of[name]].nbytes for name in expected)
        most, nbytes, group = max(_FILE_BYTES, total // _MOST_FILES), 0, list[Name]()
        for name in expected:
            if name not in self._members:
                group.append(name)
                nbytes += flat.tensors[number_of[name]].nbytes
                if nbytes >= most:
                    self._groups.append(group)
                    nbytes, group = 0, []
        self._groups += [group] if group else []
        self._members = chosen
        return [[place_of[name] for name in group] for group in self._groups]

    def _is_calm(self, name: Name) -> bool:
        return self._same.get(name, 0) >= self._needed.get(name, 1)

    def _expect_later(self, name: Name, times: int) -> None:
        self._needed[name], self._same[name] = times * self._needed.get(name, 1), 0

    def _check_declared(self, large: Sequence[tuple[Name, int]]) -> None:
        """Warn, once, of patterns that match nothing."""
        unchecked, self._unchecked = self._unchecked, ()
        keys = [key_of(name[0]) for name, _ in large] if unchecked else []
        for pattern in unchecked:
            if not fnmatch.filter(keys, pattern):
                guess = closest(pattern, keys)
                hint = "" if guess is None else f"; did you mean '{guess}'?"
                text = "checkpoint.reuse.frozen: '%s' matches no tensor of %d KB or more on this rank%s"
                logger.warning(text, pattern, _LARGE_BYTES >> 10, hint)

    def _is_declared(self, name: Name) -> bool:
        key = key_of(name[0])
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in self._declared)


def _large_in(structure: Structure) -> list[tuple[Name, int]]:
    """The large tensors to store: name, and number in the state."""
    return [
        (name_of(structure, place), entry.tensor)
        for place, entry in enumerate(structure.stored)
        if entry.nbytes >= _LARGE_BYTES and entry.window is None
    ]


def _trained_pointers(flat: FlatState) -> set[int]:
    """Addresses of the parameters that optimizers in a state have stepped, and of their optimizer state."""
    trained = [
        tensor
        for _, optimizer in flat.stateful
        if isinstance(optimizer, torch.optim.Optimizer)
        for parameter, values in optimizer.state.items()
        if isinstance(parameter, torch.Tensor) and parameter.requires_grad
        for tensor in (parameter, *(value for value in values.values() if isinstance(value, torch.Tensor)))
    ]
    return {part.data_ptr() for tensor in trained for part in dense_parts(tensor)}


def _frozen_pointers(flat: FlatState) -> set[int]:
    """Addresses of the parameters that need no gradient, of the modules in a state."""
    frozen = [
        parameter
        for _, value in flat.stateful
        if isinstance(value, torch.nn.Module)
        for parameter in value.parameters()
        if not parameter.requires_grad
    ]
    return {part.data_ptr() for parameter in frozen for part in dense_parts(parameter)}
