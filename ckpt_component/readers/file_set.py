"""Parallel reads of byte ranges of the files of a checkpoint, straight into their destination."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import NamedTuple

import torch

from ..errors import CheckpointCorruptError
from ..memory.page_cache import share_in_memory
from ..memory.scratch import ScratchPool
from ..storage.checksum import Checksum
from ..storage.safe_open import is_plain_name, open_regular, read_failure
from .direct_io import DirectReader, is_on_disk

logger = logging.getLogger(__name__)

#: Read and summed at a time: what fits the processor's cache is fetched from memory once, not twice.
CHUNK_BYTES = 1 << 20
_MAX_THREADS = 4
#: With direct I/O, where nothing is read ahead and threads wait for the disk.
_MAX_DIRECT_THREADS = 8
#: What a thread reads before it takes the next part of the files, and what is announced to the disk at a time.
_BATCH_BYTES = 32 << 20
#: Bytes that are not needed are read too, rather than skipped, up to this gap.
GAP_BYTES = 32 << 10


class RangeRead(NamedTuple):
    """A range of a file, and what reads it."""

    file: str
    offset: int
    length: int
    read: Callable[[], None]


class FileSet:
    """The files of one checkpoint folder, opened when first needed. A context manager.

    Only plain names and regular files: nothing outside the folder is read, no link is followed, no FIFO waited for.

    Args:
        folder: of the checkpoint.
        shared: whether other processes on this host read the same files at the same time, so that the page cache
            serves them all. Otherwise what is not cached is read with direct I/O.
    """

    def __init__(self, folder: str, *, shared: bool = True) -> None:
        self._folder = folder
        self._shared = shared
        self._descriptors: dict[str, int] = {}
        self._direct: DirectReader | None = None
        self._reads_ahead = False
        self.scratch = ScratchPool()

    def descriptor(self, name: str) -> int:
        """A descriptor for reading, owned by this object.

        Raises:
            CheckpointCorruptError: the name leaves the folder, or there is no such regular file.
            CheckpointUnreadableError: the file cannot be opened.
        """
        if name not in self._descriptors:
            if not is_plain_name(name):
                raise CheckpointCorruptError(
                    f"{self._folder} refers to the file {name!r:.200}, which is not a plain name."
                )
            path = os.path.join(self._folder, name)
            try:
                self._descriptors[name] = open_regular(path)
            except OSError as error:
                raise read_failure(path, error) from error
        return self._descriptors[name]

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        """Fill a buffer from `offset` of a file on; False when the file ends before.

        Raises:
            CheckpointUnreadableError: the read fails.
        """
        fd = self.descriptor(name)
        try:
            while buffer.nbytes:
                count = None if self._direct is None else self._direct.read(fd, buffer, offset)
                if count is None:
                    count = os.preadv(fd, [buffer], offset)
                if count == 0:
                    return False
                offset += count
                buffer = buffer[count:]
        except OSError as error:
            raise read_failure(os.path.join(self._folder, name), error) from error
        return True

    def fill_block(self, name: str, block: memoryview, offset: int, length: int) -> int | None:
        """Fill a block of memory with a range of a file, wherever in the block direct I/O can put it.

        Args:
            name: of the file.
            block: begins at a page, and is at least two pages longer than the range.
            offset: in the file.
            length: of the range.

        Returns:
            Where in the block the range begins; None when the file ends before.

        Raises:
            CheckpointUnreadableError: the read fails.
        """
        if self._direct is not None:
            start = self._direct.read_into(self.descriptor(name), block, offset, length)
            if start is not None:
                return start
        with block[:length] as view:
            return 0 if self.fill(name, view, offset) else None

    def fill_summed(
        self, name: str, buffers: Iterable[memoryview], offset: int, checksum: Checksum | None
    ) -> int | None:
        """Fill buffers, one after the other, from `offset` of a file on, and take their checksum on the way.

        Returns:
            The checksum, 0 if none is taken; None when the file ends before.

        Raises:
            CheckpointUnreadableError: the read fails.
        """
        stream = None if checksum is None else checksum.stream()
        for buffer in buffers:
            for start in range(0, buffer.nbytes, CHUNK_BYTES):
                chunk = buffer[start : start + CHUNK_BYTES]
                if not self.fill(name, chunk, offset):
                    return None
                if stream is not None:
                    stream.update(chunk)
                offset += chunk.nbytes
        return 0 if stream is None else stream.value()

    def read_all(self, reads: Sequence[RangeRead]) -> None:
        """Read many ranges in the order of the files, in as many threads as help.

        Autograd is off during it, so that leaves can be filled.

        Raises:
            Exception: the first one of `RangeRead.read`, after all threads have ended.
            CheckpointCorruptError, CheckpointUnreadableError: a file cannot be opened; nothing is read.
        """
        if not reads:
            return
        ordered = sorted(reads, key=attrgetter("file", "offset", "length"))
        ranges = [(self.descriptor(read.file), read.offset, read.length) for read in ordered]
        share, direct = None, False
        try:
            share = share_in_memory(ranges)
            direct = not self._shared and share is not None and share < 0.5 and is_on_disk(self._folder)
        except OSError as error:
            logger.info("cannot query the page cache for %s (%s)", self._folder, error)
        processors = os.cpu_count() or 1
        threads = min(processors, _MAX_THREADS, len(ordered))
        if direct:
            self._direct = DirectReader(self._folder, self._descriptors.values(), self.scratch)
            threads = min(2 * processors, _MAX_DIRECT_THREADS, len(ordered))  # half of them wait for the disk
        self._reads_ahead = not direct and share != 1
        batches = _batches(ordered, threads)

        def read_batch(number: int) -> None:
            for upcoming in range(number + threads if number else 0, number + threads + 1):
                if self._reads_ahead and upcoming < len(batches):
                    self._read_ahead(batches[upcoming])
            with torch.no_grad():  # holds for one thread alone
                for read in batches[number]:
                    read.read()

        if threads == 1:
            for number in range(len(batches)):
                read_batch(number)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-read") as pool:
            for _ in pool.map(read_batch, range(len(batches))):
                pass

    def _read_ahead(self, batch: Sequence[RangeRead]) -> None:
        """Let the disk read a batch into the page cache, while bytes of another one are summed and copied."""
        extents: list[tuple[str, int, int]] = []
        for name, offset, length, _ in batch:
            last = extents[-1] if extents else ("", 0, 0)
            if last[0] == name and offset - last[2] <= GAP_BYTES:
                extents[-1] = name, last[1], max(last[2], offset + length)
            else:
                extents.append((name, offset, offset + length))
        try:
            for name, start, end in extents:
                os.posix_fadvise(self.descriptor(name), start, end - start, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            # It is advice alone: if the file itself is unreadable, the read fails.
            self._reads_ahead = False
            logger.info("read-ahead disabled for %s: posix_fadvise failed (%s)", self._folder, error)

    def __enter__(self) -> FileSet:
        return self

    def __exit__(self, *_: object) -> None:
        if self._direct is not None:
            self._direct.close()
        self.scratch.close()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _batches(reads: Sequence[RangeRead], threads: int) -> list[list[RangeRead]]:
    """What a thread reads at a time: neighbours, so that all threads are near each other in the files."""
    goal = min(sum(map(attrgetter("length"), reads)) / (threads * 4) + 1, _BATCH_BYTES)
    batches: list[list[RangeRead]] = [[]]
    filled = 0
    for read in reads:
        if filled >= goal:
            batches.append([])
            filled = 0
        batches[-1].append(read)
        filled += read.length
    return batches
