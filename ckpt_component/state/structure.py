"""Structure: the keys, dtypes, shapes, strides, devices and ties of a state dict.

It is compared at every save, so that a change is always noticed.
"""

from __future__ import annotations

import copy
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointStageError
from .flatten import FlatState
from .objects import STORED_DTYPES, check_tensor
from .paths import Path, key_of, keys_of
from .tensors import BATCH, ORDINARY

_COMPLEX = frozenset(dtype for dtype in STORED_DTYPES if dtype.is_complex)

#: (tensor, other, distance): the data pointer of a tensor minus that of another, in bytes.
Relation = tuple[int, int, int]


def element_bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    """The payload of a tensor in bytes."""
    return shape.numel() * dtype.itemsize


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Stored(NamedTuple):  # there may be a hundred thousand, and a dataclass takes longer to make
    """A tensor to store: the first of those that share the same memory.

    Attributes:
        tensor: its number in `FlatState.tensors`
        window: None, or (start, count): store `count` elements of the tensor's storage instead, from `start` elements
            after the tensor's first one (negative: before). Used for tensors that overlap in part.
    """

    tensor: int
    dtype: torch.dtype
    shape: torch.Size
    window: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return element_bytes(self.dtype, self.shape)


class Structure:
    """What must be equal between two saves to reuse the layout.

    Attributes:
        tensor_paths: path of each tensor, as in `FlatState`
        object_paths: path of each object
        containers: (path, kind), as in `FlatState`
        shards: for each tensor, which part of a whole tensor it is, or None
        elsewhere: paths of the tensors of which only other ranks hold parts
        pointers: data pointer of each tensor
        stored: the tensors to store; tied tensors once
        stored_of: for each tensor, the number of its entry in `stored`
        ties: relations of the tensors that share the same memory

    Raises:
        CheckpointStageError: a tensor that cannot be checkpointed, or two paths with the same flat key
    """

    def __init__(self, flat: FlatState) -> None:
        _check(flat)
        tensors = flat.tensors
        self.tensor_paths = flat.tensor_paths
        self.object_paths = flat.object_paths
        self.containers = flat.containers
        self.shards = flat.shards
        self.elsewhere = list(flat.elsewhere)
        self.pointers = flat.pointers
        self._columns = [_Columns.of(tensors[first : first + BATCH]) for first in range(0, len(tensors), BATCH)]

        def column(name: str) -> list[Any]:
            return [value for part in self._columns for value in getattr(part, name)]

        dtypes, shapes = column("dtypes"), column("shapes")
        #: Strides of the tensors that are not contiguous, by number.
        self._strides = {
            number: tensors[number].stride() for number, flag in enumerate(column("contiguous")) if not flag
        }
        #: Conjugate and negative views, whose memory does not hold their values.
        self._views = {number for number, flag in enumerate(column("negated")) if flag}
        self._views |= {number for number, each in enumerate(dtypes) if each.is_complex and tensors[number].is_conj()}
        self.ties: list[Relation] = []
        count = Counter(self.pointers)
        self._distinct_pointers = len(count)
        entries = list(map(Stored, range(len(tensors)), dtypes, shapes))
        #: The first tensor of each distinct memory and form.
        first_of: dict[Any, int] = {}
        for number, pointer in enumerate(self.pointers):
            if count[pointer] > 1 and entries[number].nbytes:
                tensor, stride = tensors[number], self._strides.get(number)
                form = (tensor.is_conj(), tensor.is_neg(), dtypes[number], shapes[number], stride, flat.shards[number])
                first = first_of.setdefault((pointer, form), number)
                if first != number:
                    self.ties.append((number, first, 0))
        first_with = {number: first for number, first, _ in self.ties}
        self.stored = [entry for entry in entries if entry.tensor not in first_with]
        place_of = {entry.tensor: place for place, entry in enumerate(self.stored)}
        self.stored_of = [place_of[first_with.get(number, number)] for number in range(len(tensors))]

    def below(self, name: Any) -> tuple[list[int], Structure]:
        """The part of the structure below one top-level key, for its own layout; `matches` is for the whole only.

        Returns:
            The numbers of its tensors here, and the part, whose paths start after the key.
        """
        numbers = [number for number, path in enumerate(self.tensor_paths) if path[0] == name]
        place_of = {number: place for place, number in enumerate(numbers)}
        part = copy.copy(self)
        part.tensor_paths = [self.tensor_paths[number][1:] for number in numbers]
        part.object_paths = [path[1:] for path in self.object_paths if path[0] == name]
        part.containers = [(path[1:], kind) for path, kind in self.containers if path[:1] == (name,)]
        part.shards = [self.shards[number] for number in numbers]
        part.elsewhere = [path[1:] for path in self.elsewhere if path[0] == name]
        part.pointers = array("Q", map(self.pointers.__getitem__, numbers))
        part._strides = {place_of[number]: stride for number, stride in self._strides.items() if number in place_of}
        part._views = {place_of[number] for number in self._views if number in place_of}
        #: The first tensor below the key of those that share the same memory, by their entry here.
        first: dict[int, int] = {}
        part.stored = []
        for place, number in enumerate(numbers):
            if first.setdefault(self.stored_of[number], len(part.stored)) == len(part.stored):
                part.stored.append(self.stored[self.stored_of[number]]._replace(tensor=place))
        part.stored_of = [first[self.stored_of[number]] for number in numbers]
        return numbers, part

    def stride_of(self, tensor: int) -> tuple[int, ...]:
        """The strides of a tensor, in elements."""
        stride = self._strides.get(tensor)
        return contiguous_stride(self._shape_of(tensor)) if stride is None else stride

    def is_dense(self, tensor: int) -> bool:
        """Whether a tensor's memory holds exactly its values, without gaps or repeats; it may be transposed."""
        shape, stride = self._shape_of(tensor), self._strides.get(tensor)
        if tensor in self._views or shape.numel() == 0:
            return False
        if stride is None:
            return True
        reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        expanded = any(size > 1 and step == 0 for size, step in zip(shape, stride, strict=True))
        return reach == shape.numel() and not expanded

    def matches(self, flat: FlatState, relations: Iterable[Relation] = ()) -> array[int] | None:
        """The data pointer of each tensor of a state, if it has this structure, whose layout can then be reused.

        Args:
            flat: the state
            relations: relations that the layout requires in addition to `ties`

        Returns:
            The pointers, taken while the tensors were in the CPU caches; None: it has another structure.
        """
        tensors = flat.tensors
        if (
            flat.tensor_paths != self.tensor_paths
            or flat.object_paths != self.object_paths
            or flat.containers != self.containers
            or flat.shards != self.shards
            or list(flat.elsewhere) != self.elsewhere
        ):
            return None
        pointers = array("Q")
        try:
            for first, columns in zip(range(0, len(tensors), BATCH), self._columns, strict=True):
                part = tensors[first : first + BATCH]
                if _Columns.of(part) != columns:
                    return None
                pointers.extend(map(torch.Tensor.data_ptr, part))
        except RuntimeError:
            return None  # a sparse or nested tensor has no shape or address; the new structure refuses it by key
        for number, stride in self._strides.items():
            if tensors[number].stride() != stride:
                return None
        if pointers == self.pointers:
            return pointers
        # Fewer distinct addresses than before: tensors became tied. A broken relation: tensors were untied.
        fits = len(set(pointers)) == self._distinct_pointers and all(
            pointers[number] - pointers[other] == distance for number, other, distance in (*self.ties, *relations)
        )
        return pointers if fits else None

    def _shape_of(self, tensor: int) -> torch.Size:
        return self.stored[self.stored_of[tensor]].shape


class _Columns(NamedTuple):
    """The properties of some tensors, compared as whole lists: a loop over tensors would take as long as their copy.

    Together with the shape, `contiguous` determines the strides of contiguous tensors.
    """

    types: list[type]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    devices: list[Any]
    contiguous: list[bool]
    conjugated: list[bool]  # empty where no tensor is complex
    negated: list[bool]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> _Columns:
        """Collect the properties of some tensors.

        Raises:
            RuntimeError: a tensor has no shape
        """
        dtypes = list(map(attrgetter("dtype"), tensors))
        on_host = list(map(attrgetter("is_cpu"), tensors))  # cheaper than creating `torch.device` objects
        return cls(
            list(map(type, tensors)),
            list(map(attrgetter("shape"), tensors)),
            dtypes,
            on_host if all(on_host) else list(map(attrgetter("device"), tensors)),
            list(map(torch.Tensor.is_contiguous, tensors)),
            [] if _COMPLEX.isdisjoint(dtypes) else list(map(torch.Tensor.is_conj, tensors)),
            list(map(torch.Tensor.is_neg, tensors)),
        )


def _check(flat: FlatState) -> None:
    """Refuse tensors that cannot be checkpointed, and different paths with the same flat key.

    An example is `{"a.b": 1, "a": {"b": 1}}`. A path may occur several times, for a tensor of which this rank holds
    several parts.
    """
    for path, tensor in zip(flat.tensor_paths, flat.tensors, strict=True):
        if (
            type(tensor) not in ORDINARY
            or tensor.is_meta
            or tensor.is_nested
            or tensor.layout is not torch.strided
            or tensor.dtype not in STORED_DTYPES
        ):
            check_tensor(tensor, key_of(path))
    paths = [*flat.tensor_paths, *flat.object_paths]
    keys = keys_of(paths)
    if len(set(keys)) == len(keys):
        return
    first: dict[str, Path] = {}
    for path, key in zip(paths, keys, strict=True):
        if first.setdefault(key, path) != path:
            raise CheckpointStageError(
                f"Two values get the same key '{key}': {list(first[key])!r} and {list(path)!r}; rename one of them."
            )
