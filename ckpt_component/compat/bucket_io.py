"""Write the files of one rank from its image in parallel, in whichever process the caller chose.

Each file is written under a temporary name and fsynced, and all are renamed once they are complete. The `.metadata` of
an earlier checkpoint in the folder is removed first, so that a crash cannot leave a loadable mixture of two. Standard
library only.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Sequence
from typing import Any

from ..core.storage.files import FileStorage
from ..core.storage.locate import file_storage
from ..errors import CheckpointSaveError
from .host_image import ImageBucket, Place

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
            from .bucket_image import preload_tensors  # imports torch, which the process of a preloaded save lacks

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
    fd = ops.create(path, len(memory) + len(bucket.tail))
    try:
        for position in range(0, len(memory), _BLOCK_BYTES):
            block = memory[position : position + _BLOCK_BYTES]
            ops.write(fd, [block], position)
            ops.start_writeback(fd, position, len(block))
        ops.write(fd, [memoryview(bucket.tail)], len(memory))
        ops.sync(fd)
    finally:
        ops.close(fd)
