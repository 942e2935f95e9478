"""From a plan's items to the bytes of files: which item goes to which file, and one block with all the files.

A stored tensor is the archive that `torch.save` would write; only its payload is copied (`image.items`). Bytes items go
as the planner made them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from ..formats.base import balanced
from ..image.arena import Arena
from ..image.copy import copy_on_host
from ..image.items import around_payload
from ..image.layout import ITEM_ALIGNMENT
from ..memory.huge_pages import PAGE, align
from ..state.structure import element_bytes
from .bucket_io import FileImage, ImageBucket, Place
from .host_image import HostImage, SharedFile

#: A file to write before its tensors are copied: path, name in `.metadata`, and what is to go in, each with its item.
WriteBucket = tuple[
    "os.PathLike[str] | str", str, tuple[list[tuple[WriteItem, bytes]], list[tuple[WriteItem, torch.Tensor]]]
]


def split_items(
    items: Sequence[WriteItem], thread_count: int, separation_hint: str | None
) -> list[tuple[str, list[WriteItem]]]:
    """Which items go to which file: (what the file's name starts with, its items), with none empty.

    Args:
        items: of the plan of one rank.
        thread_count: the most files there may be.
        separation_hint: items whose keys start with it get files of their own. The files are shared by bytes.
    """
    if separation_hint is None:
        return [("", part) for part in _split(items, thread_count)]
    separate = [item for item in items if item.index.fqn.startswith(separation_hint)]
    rest = [item for item in items if not item.index.fqn.startswith(separation_hint)]
    if not separate or not rest:
        return [(separation_hint if separate else "", part) for part in _split(items, thread_count)]
    share = sum(map(_size_of, separate)) / (sum(map(_size_of, items)) or 1)
    count = min(max(round(thread_count * share), 1), thread_count - 1)
    return [
        *(("", part) for part in _split(rest, thread_count - count)),
        *((separation_hint, part) for part in _split(separate, count)),
    ]


def _split(items: Sequence[WriteItem], bins: int) -> list[list[WriteItem]]:
    if bins == 1:
        return [list(items)] if items else []
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    parts: list[list[WriteItem]] = [[] for _ in range(bins)]
    for number, item in enumerate(item for item in items if item.type == WriteItemType.BYTE_IO):
        parts[number % bins].append(item)
    groups = balanced([_size_of(item) for item in tensors], bins) if tensors else []
    for number, group in enumerate(groups):
        parts[number] += [tensors[position] for position in group]
    return [part for part in parts if part]


def _size_of(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return int(item.tensor_data.chunk.sizes.numel()) * item.tensor_data.properties.dtype.itemsize


@dataclass
class Block:
    """Host memory with the image of a save in it, and how it is laid out."""

    image: HostImage
    slab: torch.Tensor
    form: Any = None  # what it is laid out for: lengths of bytes, dtypes and shapes, by file
    starts: list[int] = field(default_factory=list)  # of the bytes items, then of the slots
    slots: list[torch.Tensor] = field(default_factory=list)
    files: list[FileImage] = field(default_factory=list)

    @classmethod
    def of_size(cls, nbytes: int) -> Block:
        """New memory. Raises CheckpointError where there is not enough."""
        arena = Arena(nbytes, shared=True)
        try:
            # They keep the memory; the last of them to go gives it back.
            return cls(HostImage(SharedFile(os.dup(arena.shared_descriptor())), arena.nbytes, arena.memory), arena.slab)
        finally:
            arena.close()


class ImageMemory:
    """Host memory that the saves of one series use in turn, so that only the first has to lay it out.

    A save has its block for itself until its results are there.
    """

    def __init__(self) -> None:
        self._free: list[Block] = []
        self._taking = threading.Lock()

    def take(self, form: Any) -> Block | None:
        """A block that is laid out for this."""
        with self._taking:
            for number, block in enumerate(self._free):
                if block.form == form:
                    return self._free.pop(number)
        return None

    def take_size(self, nbytes: int) -> Block:
        """A block of at least this size and not much more. Others are freed: the structure has changed."""
        with self._taking:
            fitting = [block for block in self._free if nbytes <= len(block.image.memory) <= nbytes * 5 // 4 + PAGE]
            self._free = fitting[:-1]
        return fitting[-1] if fitting else Block.of_size(nbytes)

    def give_back(self, block: Block) -> None:
        """No process writes from it any more."""
        with self._taking:
            self._free.append(block)

    def clear(self) -> None:
        """Free what is not in use."""
        with self._taking:
            self._free.clear()


class ImageLease:
    """Has the image of a save for as long as another process may still have to open it; a copy has nothing.

    Args:
        memory: where the image is to be made; None: in new memory.
    """

    def __init__(self, memory: ImageMemory | None = None) -> None:
        self.memory = memory or ImageMemory()
        self.block: Block | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageLease, ()

    def end(self, *, written: bool) -> None:
        """The save is over; its memory is used again if the writing process is certainly done with it."""
        block, self.block = self.block, None
        if block is not None and written:
            self.memory.give_back(block)


def make_image(
    write_buckets: Sequence[WriteBucket], non_blocking: bool, lease: ImageLease | None = None
) -> list[ImageBucket]:
    """Copy everything into one block of host memory that is laid out as the files will be. Done on return.

    Args:
        write_buckets: what to copy.
        non_blocking: lets copies from a device run together; they are waited for at the end.
        lease: gets the image, so that it stays until the process that writes has it.

    Raises:
        CheckpointError: there is not enough host memory.
    """
    lease = lease or ImageLease()
    form = [
        ([len(data) for _, data in bytes_data], [(tensor.dtype, tensor.shape) for _, tensor in tensor_data])
        for _, _, (bytes_data, tensor_data) in write_buckets
    ]
    block = lease.memory.take(form)
    if block is None:
        block = _laid_out(form, lease.memory)
    lease.block = block
    for start, data in zip(
        block.starts, [data for _, _, (items, _) in write_buckets for _, data in items], strict=True
    ):
        block.image.memory[start : start + len(data)] = data
    _copy(block.slots, [tensor for _, _, (_, items) in write_buckets for _, tensor in items], non_blocking)
    return [
        ImageBucket(os.fspath(path), key, file) for (path, key, _), file in zip(write_buckets, block.files, strict=True)
    ]


def _laid_out(form: Sequence[tuple[list[int], list[tuple[torch.dtype, torch.Size]]]], memory: ImageMemory) -> Block:
    """A block in which everything but bytes items and payloads is in its place."""
    fixed: list[tuple[int, bytes]] = []
    starts: list[int] = []
    payloads: list[tuple[int, torch.dtype, torch.Size]] = []
    files: list[tuple[int, int, list[Place]]] = []
    base = 0
    for lengths, tensors in form:
        position = end = base
        places: list[Place] = []
        for length in lengths:
            starts.append(position)
            places.append((position - base, length))
            end = position + length
            position = align(end, ITEM_ALIGNMENT)
        for dtype, shape in tensors:
            prefix, suffix = around_payload(dtype, shape)
            payload = position + len(prefix)
            after = payload + element_bytes(dtype, shape)
            fixed += [(position, prefix), (after, suffix)]
            payloads.append((payload, dtype, shape))
            end = after + len(suffix)
            places.append((position - base, end - position))
            position = align(end, ITEM_ALIGNMENT)
        files.append((base, end, places))
        base = align(end, PAGE)
    block = memory.take_size(base)
    for position, data in fixed:
        block.image.memory[position : position + len(data)] = data
    block.starts = starts
    block.slots = [
        block.slab[start : start + element_bytes(dtype, shape)].view(dtype).view(shape)
        for start, dtype, shape in payloads
    ]
    block.files = [FileImage(block.image, *file) for file in files]
    block.form = form
    return block


def _copy(slots: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], non_blocking: bool) -> None:
    on_host = [number for number, tensor in enumerate(tensors) if tensor.is_cpu]
    copy_on_host(
        [slots[number] for number in on_host], [tensors[number] for number in on_host], torch.get_num_threads()
    )
    with torch.no_grad():
        for slot, tensor in zip(slots, tensors, strict=True):
            if not tensor.is_cpu:
                slot.copy_(tensor, non_blocking=non_blocking)
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        torch.get_device_module(device.type).synchronize(device)
