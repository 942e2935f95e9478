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
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..errors import CheckpointSaveError
from ..storage.file_system import file_system
from ..storage.fs import FsOps
from .host_image import HostImage

METADATA = ".metadata"
_BLOCK_BYTES = 8 << 20

#: (offset, length) of an item in its file.
Place = tuple[int, int]


@dataclass(frozen=True)
class FileImage:
    """One file's bytes, [start, end) of the rank's image, and where its items are, in the order of the bucket."""

    image: HostImage
    start: int
    end: int
    places: Sequence[Place]


class ImageBucket(NamedTuple):
    """A file to write: where, its name in `.metadata`, and its bytes."""

    path: str
    storage_key: str
    data: FileImage


class ResultsQueue(Protocol):
    """What takes the results: a `ResultMailbox`, or a queue of any kind."""

    def put(self, result: Any) -> None:
        """Take one result."""
        ...


def write_preloaded_data_multiproc(
    transform_list: Sequence[Any],
    rank: int,
    write_buckets: Sequence[Any],
    global_results_queue: ResultsQueue,
    *,
    ops: FsOps | None = None,
) -> None:
    """Write all buckets of a rank, each by a thread of its own (writes do not hold the GIL).

    An error of a bucket is a result, as in the reference: it reaches the trainer by `retrieve_write_results`.

    Args:
        transform_list: of the reference; must be empty.
        rank: whose they are.
        write_buckets: what `preload_tensors` returned. What it is given will do too, and is then preloaded here.
        global_results_queue: gets {number of the bucket: places of its items}, or the first error.
        ops: where effects go; None: the file system, durably.
    """
    written = _try_to_write(
        transform_list,
        write_buckets,
        ops or file_system(durable=True, process="writer"),
        f"Rank {rank} could not write its part of the checkpoint",
    )
    global_results_queue.put(written if isinstance(written, CheckpointSaveError) else dict(enumerate(written)))


def write_preloaded_data(
    transform_list: Sequence[Any],
    local_proc_idx: int,
    write_bucket: Any,
    results_queue: ResultsQueue,
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
    written = _try_to_write(transform_list, [write_bucket], ops, f"Bucket {local_proc_idx} could not be written")
    results_queue.put((local_proc_idx, written if isinstance(written, CheckpointSaveError) else written[0]))
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
        buckets = _preloaded(write_buckets)
        _write_all(ops, buckets)
        return [bucket.data.places for bucket in buckets]
    except Exception as error:
        failure = CheckpointSaveError(f"{what}: {type(error).__name__}: {error}", getattr(error, "errno", None))
        frames = traceback.extract_tb(error.__traceback__)
        failure.frames = [tuple(frame)[:4] for frame in frames]  # type: ignore[attr-defined]
        return failure


def _preloaded(buckets: Sequence[Any]) -> list[ImageBucket]:
    if all(isinstance(bucket, ImageBucket) for bucket in buckets):
        return list(buckets)
    from .bucket_image import make_image  # needs torch, which the process of a preloaded save does not

    return make_image(buckets, non_blocking=False)


def _write_all(ops: FsOps, buckets: Sequence[ImageBucket]) -> None:
    suffix = f".{os.urandom(4).hex()}.tmp"
    failed: list[BaseException] = []

    def write(bucket: ImageBucket) -> None:
        try:
            _write_draft(ops, bucket, bucket.path + suffix, failed)
        except BaseException as error:
            failed.append(error)  # the others stop at their next block
            raise

    try:
        with ThreadPoolExecutor(max(len(buckets), 1), thread_name_prefix="ckpt-bucket") as pool:
            pending = [pool.submit(write, bucket) for bucket in buckets]
        if failed:
            raise failed[0]
        for future in pending:
            future.result(timeout=0)
        _publish(ops, buckets, suffix)
    except BaseException:
        for bucket in buckets:
            with contextlib.suppress(OSError):  # a draft that stays does no harm; the first error counts
                ops.unlink(bucket.path + suffix)
        raise


def _write_draft(ops: FsOps, bucket: ImageBucket, draft: str, failed: Sequence[BaseException]) -> None:
    memory = bucket.data.image.memory[bucket.data.start : bucket.data.end]
    fd = ops.create(draft, len(memory))
    try:
        position = 0
        while position < len(memory) and not failed:
            block = memory[position : position + _BLOCK_BYTES]
            ops.write(fd, [block], position)
            ops.start_writeback(fd, position, len(block))
            position += len(block)
        ops.sync(fd)
    finally:
        ops.close(fd)


def _publish(ops: FsOps, buckets: Sequence[ImageBucket], suffix: str) -> None:
    folders = {os.path.dirname(bucket.path) for bucket in buckets}
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            ops.unlink(os.path.join(folder, METADATA))
            ops.sync_folder(folder)
    for bucket in buckets:
        ops.replace(bucket.path + suffix, bucket.path)
    for folder in folders:
        ops.sync_folder(folder)
