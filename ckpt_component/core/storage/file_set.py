"""`FileSet`: what readers need from the files of one checkpoint folder, on any storage.

`OpenFiles` reads files, `ObjectSet` the objects of a bucket; `Storage.open_files` chooses. Both read byte ranges in
several threads, directly into their destinations.
"""

from __future__ import annotations

import errno
import io
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import IO, Any, NamedTuple, TypeVar

from ...errors import CheckpointCorruptError
from ..outside import OUTSIDE, Outside
from ..pages import ScratchBlock
from ..progress import Progress, no_progress
from .checksum import Checksum
from .safe_open import READ_TWICE, is_plain_name

logger = logging.getLogger("ckpt_component.storage")
Self = TypeVar("Self", bound="FileSet")

#: Bytes to read and checksum at a time: they fit the processor's cache, so memory is accessed once, not twice.
CHUNK_BYTES = 1 << 20
#: Gaps up to this size are read rather than skipped.
GAP_BYTES = 32 << 10
#: Not worth starting other threads for.
_FEW_BYTES = 1 << 20


class RangeRead(NamedTuple):
    """A range of a file, and the function that reads it."""

    file: str
    offset: int
    length: int
    read: Callable[[], None]


class FileSet(ABC):
    """The files of one checkpoint folder, opened when first needed. A context manager.

    Accepts only plain names of regular files: it never reads outside the folder, follows a link, or waits for a FIFO.

    Args:
        folder: folder of the checkpoint
        outside: that of its storage

    Attributes:
        outside: the same
    """

    #: Most bytes of a batch, the unit that threads take and that is read ahead.
    _batch_bytes = 32 << 20
    #: Least bytes of a batch.
    _least_batch_bytes = 0

    def __init__(self, folder: str, outside: Outside = OUTSIDE) -> None:
        self.outside = outside
        self._folder = folder
        self._of_thread = outside.thread_values()
        self._blocks: list[ScratchBlock] = []

    @abstractmethod
    def size(self, name: str) -> int:
        """The size of a file in bytes, which is opened.

        Raises:
            CheckpointCorruptError: the name points outside the folder, or there is no such regular file
            CheckpointUnreadableError: the file cannot be opened
        """

    @abstractmethod
    def stream(self, name: str) -> IO[bytes]:
        """A stream of a file, at its beginning, for formats that are read in no order. The caller closes it.

        Raises:
            CheckpointCorruptError, CheckpointUnreadableError: as for `size`. What the stream raises is an OSError.
        """

    @property
    def seen_by_all(self) -> bool:
        """Whether all ranks of a load read the same copy of each file, so that one of them can verify it for all."""
        return True

    @property
    def block(self) -> ScratchBlock:
        """The calling thread's block of memory."""
        block: ScratchBlock | None = getattr(self._of_thread, "block", None)
        if block is None:
            block = self._of_thread.block = self._new_block()
            self._blocks.append(block)
        return block

    def _new_block(self) -> ScratchBlock:
        return ScratchBlock(huge=False)

    @abstractmethod
    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        """Fill a buffer with a file's bytes from `offset`; False if the file is too short.

        Raises:
            CheckpointUnreadableError: the read fails
        """

    def fill_block(self, name: str, offset: int, length: int) -> int | None:
        """Read a range of a file into the thread's block.

        Args:
            name: name of the file
            offset: start of the range in the file
            length: length of the range, at most `MAX_BYTES`

        Returns:
            Where in the block the range begins, which depends on direct I/O; None if the file is too short.

        Raises:
            CheckpointUnreadableError: the read fails
        """
        with self.block.view[:length] as begin:
            return 0 if self.fill(name, begin, offset) else None

    def view(self, name: str, offset: int, length: int) -> memoryview | None:
        """Return a range of a file for reading alone, without a copy where that is possible.

        Arguments as for `fill_block`.

        Returns:
            The bytes, which the caller does not change, and releases before this thread reads again; None if the file
            is too short.

        Raises:
            CheckpointUnreadableError: the read fails
        """
        start = self.fill_block(name, offset, length)
        return None if start is None else self.block.view[start : start + length]

    def fill_summed(
        self, name: str, buffers: Iterable[memoryview], offset: int, checksum: Checksum | None
    ) -> int | None:
        """Fill consecutive buffers with a file's bytes from `offset`, and compute their checksum.

        Returns:
            The checksum, 0 without an algorithm; None if the file is too short.

        Raises:
            CheckpointUnreadableError: the read fails
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

    def verified(self, name: str, offset: int, length: int, damage: Callable[[], str | None]) -> str | None:
        """Read and verify a range; if that finds damage, once more past all caches.

        A network or a memory may damage one answer although the stored bytes are whole.

        Args:
            name: name of the file
            offset: start of the range in the file
            length: length of the range
            damage: reads the range; returns what of it does not match its checksum, None if all does

        Returns:
            What is damaged in both answers; None if one is right, with a warning if it is the second.
        """
        first = damage()
        if first is None:
            return None
        self._forget(name, offset, length)
        second = damage()
        if second is None:
            path = os.path.join(self._folder, name)
            logger.warning(READ_TWICE, f"{first} of {path}")
        return second

    @abstractmethod
    def _forget(self, name: str, offset: int, length: int) -> None:
        """Drop what is cached of a range, so that it is read from the storage again."""

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
        batch_bytes: float = math.inf,
    ) -> None:
        """Read many ranges in file order, in several threads where that is faster.

        Args:
            reads: the ranges
            progress: follows the bytes
            batch_bytes: a thread takes no further range when it has so many bytes; threads take what comes next
            inside: makes the context that each thread reads in, such as `torch.no_grad`

        Raises:
            Exception: the first one raised by a `RangeRead.read`, after all threads have ended
            CheckpointCorruptError, CheckpointUnreadableError: a file cannot be opened; nothing is read
        """
        ordered = sorted(reads, key=attrgetter("file", "offset", "length"))
        for name in dict.fromkeys(map(attrgetter("file"), ordered)):
            self.size(name)
        total = sum(map(attrgetter("length"), ordered))
        threads = self._choose_ways(ordered) if total > _FEW_BYTES else 1
        even = max(total / (threads * 4) + 1, self._least_batch_bytes)
        batches = _batches(ordered, min(even, self._batch_bytes, batch_bytes))
        self._begin(batches)

        def read_batch(number: int) -> None:
            self._before(batches, number, threads)
            with inside():
                for read in batches[number]:
                    read.read()
            self._after(number)
            advance(sum(map(attrgetter("length"), batches[number])))

        with progress(f"reading {os.path.basename(self._folder)}", total) as advance:
            if threads == 1:
                for number in range(len(batches)):
                    read_batch(number)
                return
            with self.outside.pool(threads, "ckpt-read") as pool:
                for _ in pool.map(read_batch, range(len(batches))):
                    pass

    @abstractmethod
    def _choose_ways(self, ordered: Sequence[RangeRead]) -> int:
        """Choose how to read these ranges; returns the number of threads, at most one for each range."""

    def _begin(self, batches: Sequence[Sequence[RangeRead]]) -> None:
        """Called before the batches are read, in their order as far as threads keep it."""

    def _before(self, batches: Sequence[Sequence[RangeRead]], number: int, threads: int) -> None:
        """Called before a batch is read, by the thread that reads it."""

    def _after(self, number: int) -> None:
        """Called when a batch was read."""

    def _path(self, name: str) -> str:
        """The path of a file. Raises CheckpointCorruptError if its name points outside the folder."""
        if not is_plain_name(name):
            raise CheckpointCorruptError(f"{self._folder} refers to the file {name!r:.200}, which is not a plain name.")
        return os.path.join(self._folder, name)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._blocks:
            self._blocks.pop().close()


def extents_of(reads: Iterable[RangeRead], gap: int) -> list[tuple[str, int, int]]:
    """Name, start and end of the ranges that cover sorted reads; those that are at most `gap` apart become one."""
    extents: list[tuple[str, int, int]] = []
    for name, offset, length, _ in reads:
        last = extents[-1] if extents else ("", 0, 0)
        if last[0] == name and offset - last[2] <= gap:
            extents[-1] = name, last[1], max(last[2], offset + length)
        else:
            extents.append((name, offset, offset + length))
    return extents


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


class FileStream(io.RawIOBase):
    """Reads a file from any position.

    Args:
        files: the set that it belongs to, which outlives the stream
        name: its name there
        size: its size in bytes
    """

    def __init__(self, files: FileSet, name: str, size: int) -> None:
        self._files = files
        self._name = name
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position, as streams do."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if self._position < 0:
            raise OSError(errno.EINVAL, "a position before the beginning")
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer as far as the file goes; returns how many bytes."""
        count = max(min(len(buffer), self._size - self._position), 0)
        if not self._files.fill(self._name, memoryview(buffer)[:count], self._position):
            raise OSError(errno.EIO, "the file has become shorter", self._name)
        self._position += count
        return count
