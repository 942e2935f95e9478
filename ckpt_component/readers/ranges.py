"""Parallel reads of byte ranges, straight into their destination, with the CRC taken on the way."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..errors import CheckpointCorruptError

_BLOCK = 4 << 20
_MOST_THREADS = 4
Work = TypeVar("Work")


class OpenFiles:
    """The files of one checkpoint folder, opened when first needed. A context manager.

    Only plain names and regular files: nothing outside the folder is read, and no link is followed.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}

    def descriptor(self, name: str) -> int:
        """A descriptor for reading, owned by this object.

        Raises:
            CheckpointCorruptError: the name leaves the folder, or there is no such file.
        """
        found = self._descriptors.get(name)
        if found is None:
            if os.path.basename(name) != name or name in ("", ".", ".."):
                raise CheckpointCorruptError(f"{self._folder} refers to the file {name!r}, which is not a plain name.")
            try:
                found = os.open(os.path.join(self._folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointCorruptError(
                    f"{os.path.join(self._folder, name)} cannot be read: {error.strerror}."
                ) from error
            self._descriptors[name] = found
        return found

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def read_full(fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
    """Fill all buffers from `offset` on; False when the file ends before."""
    pending = [view for view in buffers if view.nbytes]
    while pending:
        count = os.preadv(fd, pending, offset)
        if count == 0:
            return False
        offset += count
        while pending and count >= pending[0].nbytes:
            count -= pending.pop(0).nbytes
        if count:
            pending[0] = pending[0][count:]
    return True


def crc_of(buffers: Sequence[memoryview]) -> int:
    """The CRC-32 of the buffers, one after the other."""
    crc = 0
    for view in buffers:
        crc = zlib.crc32(view, crc)
    return crc


def crc_of_range(fd: int, offset: int, length: int) -> int | None:
    """The CRC-32 of a range of a file, or None when the file ends before."""
    buffer = memoryview(bytearray(min(length, _BLOCK)))
    crc, position = 0, 0
    while position < length:
        view = buffer[: min(length - position, _BLOCK)]
        if not read_full(fd, [view], offset + position):
            return None
        crc = zlib.crc32(view, crc)
        position += view.nbytes
    return crc


def in_parallel(work: Sequence[Work], sizes: Sequence[int], run: Callable[[Work], None]) -> None:
    """Call `run` for all of `work`, in as many threads as help, each with consecutive pieces of about equal bytes.

    Raises:
        Exception: the first one of `run`, after all threads have ended.
    """
    threads = min(_MOST_THREADS, os.cpu_count() or 1, len(work))
    if threads <= 1:
        for piece in work:
            run(piece)
        return
    goal = sum(sizes) / (threads * 4) + 1
    batches: list[list[Work]] = [[]]
    filled = 0.0
    for piece, size in zip(work, sizes, strict=True):
        if filled >= goal:
            batches.append([])
            filled = 0
        batches[-1].append(piece)
        filled += size

    def run_batch(batch: list[Work]) -> None:
        for piece in batch:
            run(piece)

    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-read") as pool:
        for _ in pool.map(run_batch, batches):
            pass
