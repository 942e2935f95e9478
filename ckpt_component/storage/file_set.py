"""Parallel reads of byte ranges of a checkpoint's files, directly into their destinations."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

from ..errors import CheckpointCorruptError
from ..memory import libc
from ..memory.page_cache import share_in_memory
from ..memory.scratch import ScratchBlock
from ..progress import Progress, no_progress
from .checksum import Checksum
from .direct_io import MAX_BYTES, PAGE, DirectReader, is_on_disk
from .safe_open import is_plain_name, open_regular, read_failure

logger = logging.getLogger(__name__)

#: Bytes to read and checksum at a time: they fit the processor's cache, so memory is accessed once, not twice.
CHUNK_BYTES = 1 << 20
#: Not worth starting other threads for.
_FEW_BYTES = 1 << 20
_MAX_THREADS = 4
#: Used with direct I/O, where threads wait for the disk because nothing is read ahead.
_MAX_DIRECT_THREADS = 8
#: Most bytes of a batch, the unit that threads take and that is read ahead.
_BATCH_BYTES = 32 << 20
#: Gaps up to this size are read rather than skipped.
GAP_BYTES = 32 << 10


class RangeRead(NamedTuple):
    """A range of a file, and the function that reads it."""

    file: str
    offset: int
    length: int
    read: Callable[[], None]


class FileSet:
    """The files of one checkpoint folder, opened when first needed. A context manager.

    Accepts only plain names of regular files: it never reads outside the folder, follows a link, or waits for a FIFO.

    Args:
        folder: Folder of the checkpoint.
        shared: Whether other processes on this host read the same files at the same time, so that the page cache
            serves them all. If not, uncached data is read with direct I/O.
    """

    def __init__(self, folder: str, *, shared: bool = True) -> None:
        self._folder = folder
        self._shared = shared
        self._descriptors: dict[str, int] = {}
        self._direct: DirectReader | None = None
        self._reads_ahead = False
        self._of_thread = threading.local()
        self._blocks: list[ScratchBlock] = []

    def descriptor(self, name: str) -> int:
        """A descriptor for reading, owned by this object.

        Raises:
            CheckpointCorruptError: The name points outside the folder, or there is no such regular file.
            CheckpointUnreadableError: The file cannot be opened.
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

    @property
    def block(self) -> ScratchBlock:
        """The calling thread's block of memory."""
        block: ScratchBlock | None = getattr(self._of_thread, "block", None)
        if block is None:
            block = self._of_thread.block = ScratchBlock(huge=self._direct is not None)
            self._blocks.append(block)
        return block

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        """Fill a buffer with a file's bytes from `offset`; False if the file is too short.

        Raises:
            CheckpointUnreadableError: the read fails.
        """
        fd = self.descriptor(name)
        if self._direct is not None:
            block = self.block.view
            while count := self._direct.read(fd, block, offset, min(buffer.nbytes, MAX_BYTES)):
                # Releases the GIL, unlike a slice assignment.
                libc.memmove(libc.address_of(buffer), libc.address_of(block) + offset % PAGE, count)
                offset += count
                buffer = buffer[count:]
        return self._fill_through_cache(name, buffer, offset)

    def fill_block(self, name: str, offset: int, length: int) -> int | None:
        """Read a range of a file into the thread's block.

        Args:
            name: Name of the file.
            offset: Start of the range in the file.
            length: Length of the range, at most `MAX_BYTES`.

        Returns:
            Where in the block the range begins, which depends on direct I/O; None if the file is too short.

        Raises:
            CheckpointUnreadableError: the read fails.
        """
        view = self.block.view
        if self._direct is not None and self._direct.read(self.descriptor(name), view, offset, length) == length:
            return offset % PAGE
        with view[:length] as begin:
            return 0 if self._fill_through_cache(name, begin, offset) else None

    def _fill_through_cache(self, name: str, buffer: memoryview, offset: int) -> bool:
        fd = self.descriptor(name)
        try:
            while buffer.nbytes:
                count = os.preadv(fd, [buffer], offset)
                if count == 0:
                    return False
                offset += count
                buffer = buffer[count:]
        except OSError as error:
            raise read_failure(os.path.join(self._folder, name), error) from error
        return True

    def fill_summed(
        self, name: str, buffers: Iterable[memoryview], offset: int, checksum: Checksum | None
    ) -> int | None:
        """Fill consecutive buffers with a file's bytes from `offset`, and compute their checksum.

        Returns:
            The checksum, 0 without an algorithm; None if the file is too short.

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

    def damaged(self, name: str, what: str) -> CheckpointCorruptError:
        """The error for bytes of a file that do not match their checksum."""
        return CheckpointCorruptError(
            f"{what} of {os.path.join(self._folder, name)} is damaged: the bytes do not match the checksum taken at "
            "the save."
        )

    def read_all(
        self,
        reads: Sequence[RangeRead],
        progress: Progress = no_progress,
        *,
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Read many ranges in file order, in several threads where that is faster.

        Args:
            reads: The ranges.
            progress: Follows the bytes.
            inside: Makes the context that each thread reads in, such as `torch.no_grad`.

        Raises:
            Exception: The first one raised by a `RangeRead.read`, after all threads have ended.
            CheckpointCorruptError, CheckpointUnreadableError: A file cannot be opened; nothing is read.
        """
        ordered = sorted(reads, key=attrgetter("file", "offset", "length"))
        ranges = [(self.descriptor(read.file), read.offset, read.length) for read in ordered]
        total = sum(map(attrgetter("length"), ordered))
        threads = self._choose_ways(ranges) if total > _FEW_BYTES else 1
        batches = _batches(ordered, min(total / (threads * 4) + 1, _BATCH_BYTES))

        def read_batch(number: int) -> None:
            for upcoming in range(number + threads if number else 0, number + threads + 1):
                if self._reads_ahead and upcoming < len(batches):
                    self._read_ahead(batches[upcoming])
            with inside():
                for read in batches[number]:
                    read.read()
            advance(sum(map(attrgetter("length"), batches[number])))

        with progress(f"reading {os.path.basename(self._folder)}", total) as advance:
            if threads == 1:
                for number in range(len(batches)):
                    read_batch(number)
                return
            with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-read") as pool:
                for _ in pool.map(read_batch, range(len(batches))):
                    pass

    def _choose_ways(self, ranges: Sequence[tuple[int, int, int]]) -> int:
        """Choose direct I/O, read-ahead or plain reads by what the page cache holds; returns the number of threads."""
        share, direct = None, False
        try:
            share = share_in_memory(ranges)
            direct = not self._shared and share is not None and share < 0.5 and is_on_disk(self._folder)
        except OSError as error:
            logger.info("cannot query the page cache for %s (%s)", self._folder, error)
        self._reads_ahead = not direct and share != 1
        processors = os.cpu_count() or 1
        if direct:
            self._direct = DirectReader(self._folder, self._descriptors.values())
            return min(2 * processors, _MAX_DIRECT_THREADS, len(ranges))  # half of them wait for the disk
        return min(processors, _MAX_THREADS, len(ranges))

    def _read_ahead(self, batch: Sequence[RangeRead]) -> None:
        """Let the disk read a batch into the page cache while other batches are checksummed and copied."""
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
            # This is only advice: if the file itself is unreadable, the read fails.
            self._reads_ahead = False
            logger.info("read-ahead disabled for %s: posix_fadvise failed (%s)", self._folder, error)

    def __enter__(self) -> FileSet:
        return self

    def __exit__(self, *_: object) -> None:
        if self._direct is not None:
            self._direct.close()
        while self._blocks:
            self._blocks.pop().close()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _batches(reads: Sequence[RangeRead], size: float) -> list[list[RangeRead]]:
    """Group neighbouring reads, so that all threads work near each other in the files."""
    batches: list[list[RangeRead]] = [[]]
    filled = 0
    for read in reads:
        if filled >= size:
            batches.append([])
            filled = 0
        batches[-1].append(read)
        filled += read.length
    return batches
