"""Structure and layout: what a state dict is made of, and where each of its bytes goes.

The structure is compared on every save, so that a changed key, dtype, shape, stride, device or tie is always noticed;
the layout is computed once per structure by the writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .items import element_bytes
from .objects import check_tensor
from .tree import FlatState, check_unique, key_of

#: Every item and every file starts at such a boundary of the image, so that slots are aligned for any dtype,
#: and whole files for direct I/O.
ITEM_ALIGNMENT = 64
PAGE = 4096


def align(position: int, boundary: int) -> int:
    """The next multiple of `boundary` at or after `position`."""
    return -(-position // boundary) * boundary


@dataclass(frozen=True)
class Stored:
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
        for path, tensor in zip(flat.tensor_paths, flat.tensors, strict=True):
            check_tensor(tensor, key_of(path))
        check_unique([*flat.tensor_paths, *flat.object_paths])
        self.tensor_paths = flat.tensor_paths
        self.object_paths = flat.object_paths
        self.containers = flat.containers
        #: For each tensor which part of a whole it is, or None.
        self.shards = flat.shards
        tensors = flat.tensors
        self._types = list(map(type, tensors))
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._shapes = [tensor.shape for tensor in tensors]
        self._strides = [tensor.stride() for tensor in tensors]
        self._devices = [tensor.device for tensor in tensors]
        pointers = [tensor.data_ptr() for tensor in flat.tensors]
        self._distinct_pointers = len(set(pointers))
        #: For each tensor the number of its entry in `stored`.
        self.stored_of: list[int] = []
        self.stored: list[Stored] = []
        #: (tensor, other, distance in bytes): addresses that the layout relies on; 0 for the same memory.
        self.relations: list[tuple[int, int, int]] = []
        first: dict[Any, int] = {}
        for number, (tensor, pointer) in enumerate(zip(flat.tensors, pointers, strict=True)):
            form = (
                pointer,
                tensor.is_conj(),
                tensor.is_neg(),
                tensor.dtype,
                tensor.shape,
                self._strides[number],
                flat.shards[number],
            )
            entry = first.get(form) if tensor.numel() else None
            if entry is None:
                entry = first[form] = len(self.stored)
                self.stored.append(Stored(number, tensor.dtype, tensor.shape))
            else:
                self.relations.append((number, self.stored[entry].tensor, 0))
            self.stored_of.append(entry)
        self.pointers = pointers
        self._all_on_cpu = all(tensor.is_cpu for tensor in flat.tensors)
        self._contiguous = [tensor.is_contiguous() for tensor in flat.tensors]
        self._all_contiguous = all(self._contiguous)
        self._dense = [_is_dense(tensor) for tensor in flat.tensors]

    def stride_of(self, tensor: int) -> tuple[int, ...]:
        """The strides of a tensor, in elements."""
        return tuple(self._strides[tensor])

    def is_dense(self, tensor: int) -> bool:
        """Whether a tensor's elements lie without gaps and each in its own place (also transposed), as they are."""
        return self._dense[tensor]

    def matches(self, flat: FlatState) -> bool:
        """Whether the layout made for this structure also fits `flat`."""
        if (
            flat.tensor_paths != self.tensor_paths
            or flat.object_paths != self.object_paths
            or flat.containers != self.containers
            or flat.shards != self.shards
            or not self._same_tensors(flat.tensors)
        ):
            return False
        pointers = [tensor.data_ptr() for tensor in flat.tensors]
        self.pointers = pointers
        # Fewer distinct addresses than before: something became tied. A relation that broke: it was untied.
        return len(set(pointers)) == self._distinct_pointers and all(
            pointers[number] - pointers[other] == distance for number, other, distance in self.relations
        )

    def _same_tensors(self, tensors: Sequence[torch.Tensor]) -> bool:
        # Lists, compared as wholes: the cost of a save on many small tensors is the number of steps in Python here. On
        # the CPU `is_cpu` says it without making a device, and with an equal shape `is_contiguous` says it of strides.
        strided, on_cpu = torch.strided, self._all_on_cpu
        if list(map(type, tensors)) != self._types or [tensor.shape for tensor in tensors] != self._shapes:
            return False
        if [tensor.dtype for tensor in tensors] != self._dtypes:
            return False
        if any([tensor.layout is not strided for tensor in tensors]):
            return False
        contiguous = list(map(torch.Tensor.is_contiguous, tensors))
        if contiguous != self._contiguous:
            return False
        if not self._all_contiguous and any(
            not known and tensor.stride() != stride
            for tensor, known, stride in zip(tensors, contiguous, self._strides, strict=True)
        ):
            return False
        if on_cpu:
            return all([tensor.is_cpu for tensor in tensors])
        return [tensor.device for tensor in tensors] == self._devices


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.is_conj() or tensor.is_neg() or tensor.numel() == 0:
        return False
    if tensor.is_contiguous():
        return True
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    expanded = any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return reach == tensor.numel() and not expanded


@dataclass(frozen=True)
class Item:
    """Where one stored tensor lies.

    Attributes:
        stored: number in `Layout.stored`.
        file: number in `Layout.files`.
        offset: where the item starts in its file; `length` bytes in all, CRC included over all of them.
        payload: where the tensor's own bytes start in the file.
        prefix: bytes before the payload, `suffix` after it; the same on every save.
    """

    stored: int
    file: int
    offset: int
    payload: int
    prefix: bytes
    suffix: bytes
    nbytes: int

    @property
    def length(self) -> int:
        """All bytes of the item."""
        return len(self.prefix) + self.nbytes + len(self.suffix)


@dataclass(frozen=True)
class ImageFile:
    """A file of the image: `base` is where it starts in the arena, a multiple of the page size."""

    name: str
    base: int
    size: int


@dataclass(frozen=True, eq=False)
class Layout:
    """The whole image of one rank.

    Attributes:
        structure: what it was made for.
        stored: the tensors that are stored; those of the structure, unless the format joins overlapping ones.
        files: the files whose bytes come from the arena.
        items: the stored tensors, ordered by file and offset.
        arena_bytes: how large the arena must be.
        constants: (place in the arena, bytes) that belong to no item, such as a file's header.
    """

    structure: Structure
    stored: tuple[Stored, ...]
    files: tuple[ImageFile, ...]
    items: tuple[Item, ...]
    arena_bytes: int
    constants: tuple[tuple[int, bytes], ...] = ()

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes that staging copies."""
        return sum(item.nbytes for item in self.items)

    @cached_property
    def sources(self) -> list[int]:
        """For every item the number of its tensor."""
        return [self.stored[item.stored].tensor for item in self.items]

    @cached_property
    def windows(self) -> dict[int, tuple[int, int]]:
        """The windows of items that are not the whole of their tensor, by number."""
        found = {number: self.stored[item.stored].window for number, item in enumerate(self.items)}
        return {number: window for number, window in found.items() if window is not None}

    def payload_at(self, item: Item) -> int:
        """Where an item's payload lies in the arena."""
        return self.files[item.file].base + item.payload

    def fixed_parts(self) -> list[tuple[int, bytes]]:
        """Everything in the arena that is the same on every save: (place, bytes)."""
        parts = list(self.constants)
        for item in self.items:
            start = self.files[item.file].base + item.offset
            parts.append((start, item.prefix))
            parts.append((start + len(item.prefix) + item.nbytes, item.suffix))
        return parts


def sources_of(layout: Layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensor to copy for every item, in the order of the items; to be used under `no_grad`."""
    found = [tensors[number] for number in layout.sources]
    for position, (start, count) in layout.windows.items():
        tensor = found[position]
        found[position] = tensor.as_strided((count,), (1,), tensor.storage_offset() + start)
    return found
