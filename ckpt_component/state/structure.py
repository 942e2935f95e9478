"""Structure: what a state dict is made of.

It is compared on every save, so that a changed key, dtype, shape, stride, device or tie is always noticed.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .dense_tensors import ORDINARY, TOGETHER, parts
from .flatten import FlatState, check_unique, key_of
from .objects import PACKED_DTYPES, check_tensor

_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})


def element_bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    """The payload of a tensor in bytes."""
    return shape.numel() * dtype.itemsize


class Stored(NamedTuple):  # there may be a hundred thousand, and a dataclass takes longer to make
    """One tensor that is stored: the first of those that are the same memory.

    Attributes:
        tensor: its number in `FlatState.tensors`.
        window: None, or (start, count): instead of the tensor, that many elements of its storage from `start`
            elements after the tensor's first one (negative: before). For tensors that overlap in part.
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
    """What has to be equal between two saves for the layout to be used again.

    Raises:
        CheckpointStageError: a tensor that cannot be checkpointed, or two places with the same flat key.
    """

    def __init__(self, flat: FlatState) -> None:
        tensors = flat.tensors
        for start, part in parts(tensors):
            if not _nothing_to_check(part):
                for number, tensor in enumerate(part, start):
                    check_tensor(tensor, key_of(flat.tensor_paths[number]))
        check_unique([*flat.tensor_paths, *flat.object_paths])
        self.tensor_paths = flat.tensor_paths
        self.object_paths = flat.object_paths
        self.containers = flat.containers
        #: Places of tensors of which other ranks hold all.
        self.elsewhere = list(flat.elsewhere)
        #: For each tensor which part of a whole it is, or None.
        self.shards = flat.shards
        shapes: dict[torch.Size, torch.Size] = {}  # equal ones are kept once
        self._forms = [_Form.of(part).with_shapes_from(shapes) for _, part in parts(tensors)]
        #: By number, of those that are not contiguous.
        self._strides = {number: tensors[number].stride() for number in self._where("contiguous", False)}
        #: Those whose memory does not hold their values.
        self._conjugated, self._negated = (
            {number for number, tensor in enumerate(tensors) if tensor.is_conj()},
            set(self._where("negated", True)),
        )
        #: Where each tensor's memory began when it was last looked at.
        self.pointers = array("Q", map(torch.Tensor.data_ptr, tensors))
        flat.pointers = self.pointers
        self._distinct_pointers = len(set(self.pointers))
        #: (tensor, other, distance in bytes): addresses that the layout relies on; 0 for the same memory.
        self.relations: list[tuple[int, int, int]] = []
        dtypes = (dtype for form in self._forms for dtype in form.dtypes)
        self.stored = list(map(Stored, range(len(tensors)), dtypes, self._shapes()))
        #: For each tensor the number of its entry in `stored`.
        self.stored_of: Sequence[int] = range(len(tensors))
        if self._distinct_pointers < len(tensors):
            self._join_same_memory()

    def stride_of(self, tensor: int) -> tuple[int, ...]:
        """Strides of a tensor, in elements."""
        found = self._strides.get(tensor)
        return contiguous_stride(self._shape_of(tensor)) if found is None else tuple(found)

    def is_dense(self, tensor: int) -> bool:
        """Whether a tensor's elements lie without gaps and each in its own place (also transposed), as they are."""
        shape, stride = self._shape_of(tensor), self._strides.get(tensor)
        if tensor in self._conjugated or tensor in self._negated or shape.numel() == 0:
            return False
        if stride is None:
            return True
        reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        expanded = any(size > 1 and step == 0 for size, step in zip(shape, stride, strict=True))
        return reach == shape.numel() and not expanded

    def matches(self, flat: FlatState) -> bool:
        """Whether the layout made for this structure also fits `flat`."""
        if (
            flat.tensor_paths != self.tensor_paths
            or flat.object_paths != self.object_paths
            or flat.containers != self.containers
            or flat.shards != self.shards
            or list(flat.elsewhere) != self.elsewhere
        ):
            return False
        pointers = self._pointers_if_same(flat.tensors)
        if pointers is None:
            return False
        flat.pointers = pointers
        if pointers == self.pointers:
            return True
        self.pointers = pointers
        # Fewer distinct addresses than before: something became tied. A relation that broke: it was untied.
        return len(set(pointers)) == self._distinct_pointers and all(
            pointers[number] - pointers[other] == distance for number, other, distance in self.relations
        )

    def _pointers_if_same(self, tensors: Sequence[torch.Tensor]) -> array[int] | None:
        """Where the memory of the tensors begins; None where they are others than they were."""
        pointers = array("Q")
        try:
            for known, (_, part) in zip(self._forms, parts(tensors), strict=True):
                if _Form.of(part) != known:
                    return None
                pointers.extend(map(torch.Tensor.data_ptr, part))
        except RuntimeError:
            return None  # sparse and nested tensors have no shape or no address; the new structure refuses them by key
        if any(tensors[number].stride() != stride for number, stride in self._strides.items()):
            return None
        return pointers

    def _join_same_memory(self) -> None:
        """Let tensors that are the same memory have one entry in `stored`."""
        separate, count = self.stored, Counter(self.pointers)
        first: dict[Any, int] = {}
        self.stored, stored_of = [], []
        for number, (entry, pointer) in enumerate(zip(separate, self.pointers, strict=True)):
            known = None
            if count[pointer] > 1 and entry.shape.numel():
                form = (
                    pointer,
                    number in self._conjugated,
                    number in self._negated,
                    entry.dtype,
                    entry.shape,
                    self.stride_of(number),
                    self.shards[number],
                )
                known = first.setdefault(form, len(self.stored))
            if known is None or known == len(self.stored):
                known = len(self.stored)
                self.stored.append(entry)
            else:
                self.relations.append((number, self.stored[known].tensor, 0))
            stored_of.append(known)
        self.stored_of = stored_of

    def _shapes(self) -> Iterator[torch.Size]:
        return (shape for form in self._forms for shape in form.shapes)

    def _shape_of(self, tensor: int) -> torch.Size:
        return self._forms[tensor // TOGETHER].shapes[tensor % TOGETHER]

    def _where(self, column: str, value: bool) -> list[int]:
        """Numbers of the tensors that have this value there."""
        values = (each for form in self._forms for each in getattr(form, column))
        return [number for number, each in enumerate(values) if each is value]


class _Form(NamedTuple):
    """Columns of what some tensors are, to be compared as wholes.

    A loop over tensors would take as long as their copy. With an equal shape `contiguous` says it of strides.
    """

    types: list[type]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    places: list[Any]
    contiguous: list[bool]
    conjugated: list[bool]  # empty where no tensor is complex
    negated: list[bool]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> _Form:
        """Look at some tensors.

        Raises:
            RuntimeError: a tensor has no shape.
        """
        places: list[Any] = [tensor.is_cpu for tensor in tensors]  # says it without making a device
        dtypes = [tensor.dtype for tensor in tensors]
        return cls(
            list(map(type, tensors)),
            [tensor.shape for tensor in tensors],
            dtypes,
            places if all(places) else [tensor.device for tensor in tensors],
            list(map(torch.Tensor.is_contiguous, tensors)),
            [] if _COMPLEX.isdisjoint(dtypes) else list(map(torch.Tensor.is_conj, tensors)),
            list(map(torch.Tensor.is_neg, tensors)),
        )

    def with_shapes_from(self, known: dict[torch.Size, torch.Size]) -> _Form:
        """The same, with the object from `known` for every equal shape."""
        return self._replace(shapes=[known.setdefault(shape, shape) for shape in self.shapes])


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _nothing_to_check(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether `check_tensor` has nothing to say about any of them: ordinary tensors in host memory."""
    strided = torch.strided
    return (
        ORDINARY.issuperset(map(type, tensors))
        and all([tensor.is_cpu for tensor in tensors])
        and not any([tensor.is_nested for tensor in tensors])
        and not any([tensor.layout is not strided for tensor in tensors])
        and not any([tensor.is_quantized for tensor in tensors])
        and PACKED_DTYPES.isdisjoint([tensor.dtype for tensor in tensors])
    )
