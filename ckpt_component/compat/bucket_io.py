"""Write the files of one rank from its image, all at the same time. Runs in whichever process the caller chose.

Each file is written under another name and fsynced; when all of this rank's are there, they get their names. A
checkpoint that stood in the folder before loses its `.metadata` first, so that a crash leaves no mixture of two that
could be loaded. Standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ..errors import CheckpointSaveError
from ..storage.file_system import file_system
from ..storage.fs import FsOps
from .host_image import HostImage

METADATA = ".metadata"
_BLOCK_BYTES = 8 << 20

#: (offset, length) of an item in its file.
Place = tuple[int, int]


class ImageBucket(NamedTuple):
    """A file to write.

    Attributes:
        path: where.
        storage_key: its name in `.metadata`.
        image: of the rank, with the bytes of all its files.
        start: where this file's begin there.
        end: where they end.
        tail: what follows them in the file.
        places: of the items, in the order of the bucket.
    """

    path: str
    storage_key: str
    image: HostImage
    start: int
    end: int
    tail: bytes
    places: Sequence[Place]


def write_preloaded_data_multiproc(
    transform_list: Sequence[Any],
    rank: int,
    write_buckets: Sequence[Any],
    global_results_queue: Any,
    *,
    ops: FsOps | None = None,
) -> None:
    """Write all buckets of a rank, each by a thread of its own (writes do not hold the GIL).

    An error of a bucket is a result, as in the reference: it reaches the trainer by `retrieve_write_results`.

    Args:
        transform_list: of the reference; must be empty.
        rank: whose they are.
        write_buckets: what `preload_tensors` returned. What it is given will do too, and is then preloaded here.
        global_results_queue: a `ResultMailbox` or a queue of any kind; gets {number of the bucket: places of its
            items}, or the first error.
        ops: where effects go; None: the file system, durably.
    """
    what = f"Rank {rank} could not write its part of the checkpoint"
    places = _try_to_write(transform_list, write_buckets, ops or file_system(durable=True, process="writer"), what)
    global_results_queue.put(places if isinstance(places, CheckpointSaveError) else dict(enumerate(places)))


def write_preloaded_data(
    transform_list: Sequence[Any],
    local_proc_idx: int,
    write_bucket: Any,
    results_queue: Any,
    count_queue: Any,
    use_fsync: bool,
) -> None:
    """Write one bucket, here and now.

    Args:
        transform_list: of the reference; must be empty.
        local_proc_idx: number of the bucket.
        write_bucket: one of those that `preload_tensors` returned.
        results_queue: gets (number of the bucket, places of its items or the error).
        count_queue: a joinable queue that holds one token, taken when the bucket is done; or None.
        use_fsync: whether the file is to be durable.
    """
    ops = file_system(durable=use_fsync, process="writer")
    places = _try_to_write(transform_list, [write_bucket], ops, f"Bucket {local_proc_idx} could not be written")
    results_queue.put((local_proc_idx, places if isinstance(places, CheckpointSaveError) else places[0]))
    if count_queue is not None:
        count_queue.get()
        count_queue.task_done()


def _try_to_write(
    transform_list: Sequence[Any], write_buckets: Sequence[Any], ops: FsOps, what: str
) -> list[Sequence[Place]] | CheckpointSaveError:
    """The places of the items of each bucket; or an error that any process can unpickle, with its `frames`."""
    try:
        if any(getattr(transforms, "extensions", None) for transforms in transform_list):
            raise CheckpointSaveError("Stream transforms are not supported: the bytes of a file are fixed beforehand.")
        buckets = list(write_buckets)
        if not all(isinstance(bucket, ImageBucket) for bucket in buckets):
            from .bucket_image import preload_tensors  # needs torch, which the process of a preloaded save does not

            buckets = preload_tensors(buckets, non_blocking=False)
        _write_all(ops, buckets)
        return [bucket.places for bucket in buckets]
    except Exception as error:
        failure = CheckpointSaveError(f"{what}: {type(error).__name__}: {error}", getattr(error, "errno", None))
        frames = traceback.extract_tb(error.__traceback__)
        failure.frames = [tuple(frame)[:4] for frame in frames]  # type: ignore[attr-defined]
        return failure


def _write_all(ops: FsOps, buckets: Sequence[ImageBucket]) -> None:
    suffix = f".{os.urandom(4).hex()}.tmp"
    try:
        _write_drafts(ops, buckets, suffix)
        folders = {os.path.dirname(bucket.path) for bucket in buckets}
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
            with contextlib.suppress(OSError):  # a draft that stays does no harm; the first error counts
                ops.unlink(bucket.path + suffix)
        raise


def _write_drafts(ops: FsOps, buckets: Sequence[ImageBucket], suffix: str) -> None:
    def write(bucket: ImageBucket) -> None:
        memory = bucket.image.memory[bucket.start : bucket.end]
        fd = ops.create(bucket.path + suffix, len(memory) + len(bucket.tail))
        try:
            for position in range(0, len(memory), _BLOCK_BYTES):
                block = memory[position : position + _BLOCK_BYTES]
                ops.write(fd, [block], position)
                ops.start_writeback(fd, position, len(block))
            ops.write(fd, [memoryview(bucket.tail)], len(memory))
            ops.sync(fd)
        finally:
            ops.close(fd)

    with ThreadPoolExecutor(max(len(buckets), 1), thread_name_prefix="ckpt-bucket") as pool:
        list(pool.map(write, buckets))
