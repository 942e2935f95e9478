"""The bytes of a rank's files, made from its buckets, in memory that the writing process can open.

A stored tensor is the archive that `torch.save` would write; only its payload is copied (`image.items`). Bytes items go
as the planner made them, behind the tensors of their file, so that the image depends on dtypes and shapes alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from ..image.arena import Arena
from ..image.copy import copy_on_host
from ..image.items import around_payload
from ..image.layout import ITEM_ALIGNMENT
from ..memory.huge_pages import PAGE, align
from ..state.structure import element_bytes
from .bucket_io import ImageBucket, Place
from .host_image import HostImage, SharedFile

#: A file to write before its tensors are copied: path, name in `.metadata`, and what is to go in, each with its item.
WriteBucket = tuple[
    "os.PathLike[str] | str", str, tuple[list[tuple[WriteItem, bytes]], list[tuple[WriteItem, torch.Tensor]]]
]
#: By file the dtypes and shapes of its tensors.
Form = list[list[tuple[torch.dtype, torch.Size]]]


class FilesImage:
    """Host memory in which everything but the payloads is in its place.

    Args:
        form: what it is laid out for.

    Attributes:
        form: as given.
        host_image: the memory, for another process.
        slots: for the payloads.
        files: for each file where it starts and ends in the memory, and the places of its tensors in the file.

    Raises:
        CheckpointError: there is not enough host memory.
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        self.files: list[tuple[int, int, list[Place]]] = []
        fixed: list[tuple[int, bytes]] = []
        payloads: list[tuple[int, torch.dtype, torch.Size]] = []
        base = 0
        for tensors in form:
            position = end = base
            places: list[Place] = []
            for dtype, shape in tensors:
                prefix, suffix = around_payload(dtype, shape)
                payload = position + len(prefix)
                after = payload + element_bytes(dtype, shape)
                fixed += [(position, prefix), (after, suffix)]
                payloads.append((payload, dtype, shape))
                end = after + len(suffix)
                places.append((position - base, end - position))
                position = align(end, ITEM_ALIGNMENT)
            self.files.append((base, end, places))
            base = align(end, PAGE)
        arena = Arena(base, shared=True)
        try:
            # They keep the memory; the last of them to go gives it back.
            file = SharedFile(os.dup(arena.shared_descriptor()))
            self.host_image, slab = HostImage(file, arena.nbytes, arena.memory), arena.slab
        finally:
            arena.close()
        for position, data in fixed:
            self.host_image.memory[position : position + len(data)] = data
        self.slots = [
            slab[start : start + element_bytes(dtype, shape)].view(dtype).view(shape)
            for start, dtype, shape in payloads
        ]


class ImageLease:
    """Has the image of a save for as long as another process may still have to open it; a pickled copy has nothing.

    Args:
        free: images that the saves of one series use in turn, so that only the first has to lay one out; None: a new
            one is made.
    """

    def __init__(self, free: list[FilesImage] | None = None) -> None:
        self._free = [] if free is None else free
        self._image: FilesImage | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageLease, ()

    def take(self, form: Form) -> FilesImage:
        """An image of this form. Those of another one are freed: the structure has changed."""
        fitting = [image for image in self._free if image.form == form]
        self._image = fitting.pop() if fitting else FilesImage(form)
        self._free[:] = fitting
        return self._image

    def end(self, *, reuse: bool) -> None:
        """The save is over; `reuse` its memory only when the writing process is certainly done with it."""
        image, self._image = self._image, None
        if image is not None and reuse:
            self._free.append(image)


def preload_tensors(
    write_buckets: Sequence[WriteBucket], non_blocking: bool = True, lease: ImageLease | None = None
) -> list[ImageBucket]:
    """Copy all that is to be written, CPU tensors too; what training does afterwards changes nothing. Done on return.

    Args:
        write_buckets: of `prepare_write_data`.
        non_blocking: lets copies from a device run together; they are waited for at the end.
        lease: keeps the copy until the writing process has opened it. Without it the caller has to keep the result for
            as long.

    Returns:
        The buckets to write. Pickled they are references to the copy, not the bytes.

    Raises:
        CheckpointError: there is not enough host memory.
    """
    form = [[(tensor.dtype, tensor.shape) for _, tensor in tensor_data] for _, _, (_, tensor_data) in write_buckets]
    image = (lease or ImageLease()).take(form)
    _copy(image.slots, [tensor for _, _, (_, items) in write_buckets for _, tensor in items], non_blocking)
    buckets = []
    for (path, key, (bytes_data, _)), (start, end, places) in zip(write_buckets, image.files, strict=True):
        tail, position = b"".join(data for _, data in bytes_data), end - start
        behind: list[Place] = []
        for _, data in bytes_data:
            behind.append((position, len(data)))
            position += len(data)
        buckets.append(ImageBucket(os.fspath(path), key, image.host_image, start, end, tail, behind + places))
    return buckets


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
