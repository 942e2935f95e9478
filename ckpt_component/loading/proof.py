"""Prove that a load has worked: what each object gives back is compared with what it was given.

`load_state_dict` is code of others. It may cast, go by position, or forget, and nothing in the bytes shows it.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointLoadError, first_keys
from ..state.compare import same_value
from ..state.flatten import Stateful, is_torch_own
from ..state.paths import Path, key_of
from ..state.shards import dense_parts
from ..state.tensors import ORDINARY
from ..state.unchanged_tensors import mark_of
from ..state.wrapped_modules import CanonicalNames

logger = logging.getLogger("ckpt_component.readers")

_ABSENT = object()


class Expected(NamedTuple):
    """What an object is to give back.

    Attributes:
        values: the values of the state that it is given, by path below the object
        sums: sums of the bytes of its tensors, by path, where its code may change the very values to compare with
        marks: address and version of those that have their own
    """

    values: Mapping[Path, Any]
    sums: Mapping[Path, int]
    marks: Mapping[Path, Any]


class Proof:
    """Compares the states that objects give back after a load.

    Args:
        where: the checkpoint, for messages
        may_differ: keys whose values may differ; `*` stands for any text

    Attributes:
        proven: keys of the objects that gave back all that they were given
        differing: keys of the values that differ
    """

    def __init__(self, where: str, may_differ: Sequence[str] = ()) -> None:
        self._where = where
        self._may_differ = may_differ
        self.proven: list[str] = []
        self.differing: list[str] = []
        self._errors: list[str] = []
        self._warnings: list[str] = []

    def expect(self, stateful: Stateful, state: Mapping[Any, Any]) -> Expected:
        """Note what an object is about to be given: it may change the dict that it gets."""
        values = dict(_values(state))
        sums: dict[Path, int] = {}
        marks: dict[Path, Any] = {}
        if not is_torch_own(stateful):
            # The tensors of its state were filled in place, so its code may change the very values to compare with.
            sums = {path: _sum_of(value) for path, value in values.items() if isinstance(value, torch.Tensor)}
            marks = {path: mark_of(values[path]) for path in sums if type(values[path]) in ORDINARY}
        return Expected(values, sums, marks)

    def compare(self, key: str, stateful: Stateful, expected: Expected) -> None:
        """Compare what an object gives back.

        Args:
            key: the object's key
            stateful: the object, which has taken its state
            expected: from `expect`

        Raises:
            CheckpointLoadError: it cannot give back its state
        """
        try:
            given = dict(_values(stateful.state_dict()))
        except Exception as error:
            name = type(stateful).__name__
            raise CheckpointLoadError(f"'{key}' ({name}) took its state and cannot give it back: {error}") from error
        found = self._errors if is_torch_own(stateful) else self._warnings
        differing = {
            path: _difference(value, given.get(path, _ABSENT))
            for path, value in expected.values.items()
            if not _is_back(value, given.get(path, _ABSENT))
            or (path in expected.sums and not _is_untouched(path, value, expected))
        }
        names: Mapping[Any, Any] = {}
        if differing and isinstance(stateful, torch.nn.Module):
            names = CanonicalNames(stateful, (path[0] for path in expected.values)).of
        for path, difference in differing.items():
            place = key_of((*filter(None, [key]), names.get(path[0], path[0]), *path[1:]))
            self.differing.append(place)
            if not any(fnmatch.fnmatchcase(place, pattern) for pattern in self._may_differ):
                found.append(f"{place} ({difference})")
        if not differing and key:
            self.proven.append(key)

    def conclude(self) -> None:
        """Say what differs.

        Raises:
            CheckpointLoadError: a value of an optimizer or a module of torch differs; names keys and both values
        """
        if self._warnings:
            logger.warning(
                "%s was loaded, and objects give back other values than they were given: %s; if that is how they work, "
                "name these keys in checkpoint.load.may_differ",
                self._where,
                first_keys(self._warnings),
            )
        if self._errors:
            raise CheckpointLoadError(
                f"{self._where} was loaded, and objects give back other values than they were given: "
                f"{first_keys(self._errors)}. Do not train on; report this, or name the keys in "
                "checkpoint.load.may_differ if they may differ."
            )


def _values(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The values of a state by path; a list that has no tensors or dicts is one value."""
    if isinstance(value, Mapping) and value:
        for name, element in value.items():
            yield from _values(element, (*path, name))
    elif isinstance(value, list) and any(isinstance(each, (torch.Tensor, Mapping, list)) for each in value):
        for position, element in enumerate(value):
            yield from _values(element, (*path, position))
    elif path:
        yield path, value


def _is_back(value: Any, now: Any) -> bool:
    """Whether a value was given back. Optimizers of torch make a tensor of the number that `step` once was."""
    if isinstance(now, torch.Tensor) and type(value) in (int, float):
        return now.numel() == 1 and bool(now.item() == value)
    if isinstance(value, Mapping) and isinstance(now, Mapping):
        return not value and not now  # empty ones; `_values` has gone through the others
    return same_value(value, now)


def _is_untouched(path: Path, value: torch.Tensor, expected: Expected) -> bool:
    """Whether a tensor has the bytes that its object was given. Only what torch has changed is read once more."""
    if path in expected.marks and mark_of(value) == expected.marks[path]:
        return True
    return _sum_of(value) == expected.sums[path]


def _difference(value: Any, now: Any) -> str:
    """How a value differs, with both."""
    if now is _ABSENT:
        return f"{_described(value)} is not given back"
    one, other = _described(value), _described(now)
    return f"other values of {one}" if one == other else f"{other} instead of {one}"


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{value!r:.60}"
    if value.numel() == 1:
        return f"{value.item()!r} ({str(value.dtype).removeprefix('torch.')})"
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _sum_of(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bytes, eight at a time where it can be; another value almost surely has another sum."""
    total = 0
    for each in dense_parts(tensor):
        flat = each.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        whole = flat.numel() // 8 * 8
        wide = flat[:whole].view(torch.int64) if flat.data_ptr() % 8 == 0 else flat[:whole]
        total += int(wide.sum(dtype=torch.int64)) + int(flat[whole:].sum(dtype=torch.int64))
    return total
