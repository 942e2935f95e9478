"""The image of a rank's buckets, in memory that the writing process can open.

A stored tensor is the archive that `torch.save` would write, as in the format `dcp`. Byte items follow the tensors of
their file, as the planner made them, so the image depends only on dtypes and shapes.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from ..core.image.arena import Arena
from ..core.image.copy import copy_on_host
from ..formats.dcp import layout_of_archives
from ..state.flatten import flatten
from ..state.structure import Stored, Structure
from .host_image import HostImage, ImageBucket, Place, SharedFile

#: A file to write before its tensors are copied: path, name in `.metadata`, and its contents, each with its item.
WriteBucket = tuple[
    "os.PathLike[str] | str", str, tuple[list[tuple[WriteItem, bytes]], list[tuple[WriteItem, torch.Tensor]]]
]
#: Dtypes and shapes of the tensors of each file.
Form = list[list[tuple[torch.dtype, torch.Size]]]


class FilesImage(HostImage):
    """The image, with everything except the payloads.

    Args:
        form: dtypes and shapes of each file's tensors

    Attributes:
        form: as passed
        slots: where the payloads go
        files: start and end of each file in the memory, and the locations of its tensors in the file

    Raises:
        CheckpointError: not enough host memory
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        # The tensors have no place in a state here.
        stored = [Stored(number, *each) for number, each in enumerate(itertools.chain.from_iterable(form))]
        numbers = iter(range(len(stored)))
        files = [("", list(itertools.islice(numbers, len(tensors)))) for tensors in form]
        layout = layout_of_archives(Structure(flatten({})), stored, files)
        arena = Arena(layout.arena_bytes, shared=True)
        weakref.finalize(self, arena.close)
        self.slots = arena.slots(layout)
        super().__init__(SharedFile(os.dup(arena.shared_descriptor())), arena.nbytes, arena.memory)
        places: list[list[Place]] = [[] for _ in form]
        for item in layout.items:
            places[item.file].append((item.offset, item.length))
        self.files = [(file.base, file.base + file.size, each) for file, each in zip(layout.files, places, strict=True)]


class ImageLease:
    """Keeps the image of a save while another process may still have to open it. A pickled copy keeps nothing.

    Args:
        free: images that a series of saves reuses, so that only the first save lays one out; None: make a new one
    """

    def __init__(self, free: list[FilesImage] | None = None) -> None:
        self._free = [] if free is None else free
        self._image: FilesImage | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageLease, ()

    def take(self, form: Form) -> FilesImage:
        """Return an image of this form. Images of other forms are freed, because the structure has changed."""
        fitting = [image for image in self._free if image.form == form]
        self._image = fitting.pop() if fitting else FilesImage(form)
        self._free[:] = fitting
        return self._image

    def end(self, *, reuse: bool) -> None:
        """End the save. Pass `reuse` only if the writing process has certainly finished with the memory."""
        image, self._image = self._image, None
        if image is not None and reuse:
            self._free.append(image)


def preload_tensors(
    write_buckets: Sequence[WriteBucket], non_blocking: bool = True, lease: ImageLease | None = None
) -> list[ImageBucket]:
    """Copy everything to write, including CPU tensors, so that training may change the originals after the return.

    Args:
        write_buckets: result of `prepare_write_data`
        non_blocking: run copies from a device concurrently; they are complete on return
        lease: keeps the copy until the writing process has opened it. Without one, the caller must keep the result
            that long.

    Returns:
        The buckets to write. They are pickled as references to the copy, without its bytes.

    Raises:
        CheckpointError: not enough host memory
    """
    form = [[(tensor.dtype, tensor.shape) for _, tensor in tensor_data] for _, _, (_, tensor_data) in write_buckets]
    image = (lease or ImageLease()).take(form)
    _copy(image.slots, [tensor for _, _, (_, items) in write_buckets for _, tensor in items], non_blocking)
    buckets = []
    for (path, key, (bytes_data, _)), (start, end, places) in zip(write_buckets, image.files, strict=True):
        tail = [data for _, data in bytes_data]
        lengths = list(map(len, tail))
        behind = list(zip(itertools.accumulate(lengths, initial=end - start), lengths, strict=False))
        buckets.append(ImageBucket(os.fspath(path), key, image, start, end, b"".join(tail), behind + places))
    return buckets


def _copy(slots: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], non_blocking: bool) -> None:
    copy_on_host(slots, tensors, torch.get_num_threads(), [n for n, tensor in enumerate(tensors) if tensor.is_cpu])
    devices = set()
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            if not tensor.is_cpu:
                slots[number].copy_(tensor, non_blocking=non_blocking)
                devices.add(tensor.device)
    for device in devices:
        torch.get_device_module(device.type).synchronize(device)
