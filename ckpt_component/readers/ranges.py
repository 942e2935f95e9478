"""Parallel reads of byte ranges, straight into their destination."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ..errors import CheckpointCorruptError
from ..storage.checksum import Checksum
from ..storage.regular import is_plain_name, open_regular, read_failure

_BLOCK = 4 << 20
_MOST_THREADS = 4
Work = TypeVar("Work")


class OpenFiles:
    """The files of one checkpoint folder, opened when first needed. A context manager.

    Only plain names and regular files: nothing outside the folder is read, no link is followed, no FIFO waited for.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}

    def descriptor(self, name: str) -> int:
        """A descriptor for reading, owned by this object.

        Raises:
            CheckpointCorruptError: the name leaves the folder, or there is no such regular file.
            CheckpointUnreadableError: the file cannot be opened.
        """
        found = self._descriptors.get(name)
        if found is None:
            if not is_plain_name(name):
                raise CheckpointCorruptError(
                    f"{self._folder} refers to the file {name!r:.200}, which is not a plain name."
                )
            path = os.path.join(self._folder, name)
            try:
                found = open_regular(path)
            except OSError as error:
                raise read_failure(path, error) from error
            self._descriptors[name] = found
        return found

    def fill(self, name: str, buffers: Sequence[memoryview], offset: int) -> bool:
        """Fill all buffers from `offset` of a file on; False when the file ends before.

        Raises:
            CheckpointUnreadableError: the read fails.
        """
        fd = self.descriptor(name)
        pending = [view for view in buffers if view.nbytes]
        try:
            while pending:
                count = os.preadv(fd, pending, offset)
                if count == 0:
                    return False
                offset += count
                while pending and count >= pending[0].nbytes:
                    count -= pending.pop(0).nbytes
                if count:
                    pending[0] = pending[0][count:]
        except OSError as error:
            raise read_failure(os.path.join(self._folder, name), error) from error
        return True

    def checksum(self, name: str, offset: int, length: int, checksum: Checksum) -> int | None:
        """The checksum of a range of a file, or None when the file ends before."""
        buffer = memoryview(bytearray(min(length, _BLOCK)))
        stream, position = checksum.stream(), 0
        while position < length:
            view = buffer[: min(length - position, _BLOCK)]
            if not self.fill(name, [view], offset + position):
                return None
            stream.update(view)
            position += view.nbytes
        return stream.value()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


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
