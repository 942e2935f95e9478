"""The image of a rank's buckets in memory that the writing process can open, and the files that are written from it."""

from __future__ import annotations

import contextlib
import itertools
import os
import traceback
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from ..core.image.arena import Arena
from ..core.image.copy import copy_on_host
from ..core.storage.files import FileStorage
from ..core.storage.locate import file_storage
from ..errors import CheckpointSaveError
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


METADATA = ".metadata"
_BLOCK_BYTES = 8 << 20


def write_preloaded_data_multiproc(
    transform_list: Sequence[Any],
    rank: int,
    write_buckets: Sequence[Any],
    global_results_queue: Any,
    *,
    ops: FileStorage | None = None,
) -> None:
    """Write all buckets of a rank, each in its own thread (writes release the GIL).

    As in the reference, an error is a result: `retrieve_write_results` returns it on the trainer.

    Args:
        transform_list: as in the reference; must be empty
        rank: number of the rank
        write_buckets: result of `preload_tensors`, or its argument, which is then preloaded here
        global_results_queue: a `ResultMailbox` or any queue; receives {number of the bucket: locations of its items},
            or the first error
        ops: file operations; None: those of the file system, with syncs
    """
    what = f"Rank {rank} could not write its part of the checkpoint"
    ops = ops or file_storage(process="writer")
    global_results_queue.put(_try_to_write(transform_list, write_buckets, ops, what))


def write_preloaded_data(
    transform_list: Sequence[Any],
    local_proc_idx: int,
    write_bucket: Any,
    results_queue: Any,
    count_queue: Any,
    use_fsync: bool,
) -> None:
    """Write one bucket in the calling thread.

    Args:
        transform_list: as in the reference; must be empty
        local_proc_idx: number of the bucket
        write_bucket: one of the buckets that `preload_tensors` returned
        results_queue: receives (number of the bucket, locations of its items or the error)
        count_queue: a joinable queue with one token, which is taken when the bucket is done; or None
        use_fsync: whether to fsync the file
    """
    ops = file_storage(durable=use_fsync, process="writer")
    result = _try_to_write(transform_list, [write_bucket], ops, f"Bucket {local_proc_idx} could not be written")
    results_queue.put((local_proc_idx, result[0] if isinstance(result, dict) else result))
    if count_queue is not None:
        count_queue.get()
        count_queue.task_done()


def _try_to_write(
    transform_list: Sequence[Any], write_buckets: Sequence[Any], ops: FileStorage, what: str
) -> dict[int, Sequence[Place]] | CheckpointSaveError:
    """Return the locations of items by bucket, or an error that any process can unpickle, with its `frames`."""
    try:
        if any(getattr(transforms, "extensions", None) for transforms in transform_list):
            raise CheckpointSaveError("Stream transforms are not supported: the bytes of a file are fixed beforehand.")
        buckets = list(write_buckets)
        if not all(isinstance(bucket, ImageBucket) for bucket in buckets):
            pass  # imports torch, which the process of a preloaded save lacks

            buckets = preload_tensors(buckets, non_blocking=False)
        _write_all(ops, buckets)
        return {number: bucket.places for number, bucket in enumerate(buckets)}
    except Exception as error:
        failure = CheckpointSaveError(f"{what}: {type(error).__name__}: {error}", getattr(error, "errno", None))
        frames = traceback.extract_tb(error.__traceback__)
        failure.frames = [tuple(frame)[:4] for frame in frames]  # type: ignore[attr-defined]
        return failure


def _write_all(ops: FileStorage, buckets: Sequence[ImageBucket]) -> None:
    suffix = f".{ops.outside.random_bytes(4).hex()}.tmp"
    folders = {os.path.dirname(bucket.path) for bucket in buckets}
    try:
        with ops.outside.pool(len(buckets), "ckpt-bucket") as pool:
            list(pool.map(lambda bucket: _write_draft(ops, bucket, bucket.path + suffix), buckets))
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):
                ops.unlink(os.path.join(folder, METADATA))
                ops.sync_folder(folder)
        for bucket in buckets:
            ops.replace(bucket.path + suffix, bucket.path)
        for folder in folders:
            ops.sync_folder(folder)
    except BaseException:
        for bucket in buckets:
            with contextlib.suppress(OSError):  # a remaining temporary file is harmless; the first error is reported
                ops.unlink(bucket.path + suffix)
        raise


def _write_draft(ops: FileStorage, bucket: ImageBucket, path: str) -> None:
    memory = bucket.image.memory[bucket.start : bucket.end]
    with ops.durable_at_end(ops.create(path, len(memory) + len(bucket.tail))) as fd:
        for position in range(0, len(memory), _BLOCK_BYTES):
            block = memory[position : position + _BLOCK_BYTES]
            ops.write(fd, [block], position)
            ops.start_writeback(fd, position, len(block))
        ops.write(fd, [memoryview(bucket.tail)], len(memory))
