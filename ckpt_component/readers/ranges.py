"""Parallel reads of byte ranges, straight into their destination."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import NamedTuple

import torch

from ..errors import CheckpointCorruptError
from ..memory.page_cache import share_in_memory
from ..storage.checksum import Checksum
from ..storage.safe_open import is_plain_name, open_regular, read_failure
from .direct_io import PastCache, is_on_disk
from .readahead import ReadAhead

logger = logging.getLogger(__name__)

#: Read and summed at a time: a block that fits the processor's cache is fetched from memory once, not twice.
_BLOCK = 1 << 20
_MOST_THREADS = 4
#: Past the page cache, where nothing is read but what a thread asks for.
_MOST_DIRECT = 8
#: What a thread reads before it takes the next part of the files: all threads are near each other, and near what has
#: been announced to the disk.
_BATCH_BYTES = 32 << 20


class Piece(NamedTuple):
    """A range of a file, and what reads it."""

    file: str
    offset: int
    length: int
    read: Callable[[], None]


class OpenFiles:
    """The files of one checkpoint folder, opened when first needed. A context manager.

    Only plain names and regular files: nothing outside the folder is read, no link is followed, no FIFO waited for.

    Args:
        folder: of the checkpoint.
        shared: whether others on this computer read the same bytes at the same time. The page cache then has them for
            all; else they are read past it.
    """

    def __init__(self, folder: str, *, shared: bool = True) -> None:
        self._folder = folder
        self._shared = shared
        self._descriptors: dict[str, int] = {}
        self._ahead: ReadAhead | None = None
        self._past_cache: PastCache | None = None

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

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        """Fill a buffer from `offset` of a file on; False when the file ends before.

        Raises:
            CheckpointUnreadableError: the read fails.
        """
        fd = self.descriptor(name)
        try:
            while buffer.nbytes:
                count = None if self._past_cache is None else self._past_cache.read(fd, buffer, offset)
                if count is None:
                    count = os.preadv(fd, [buffer], offset)
                if count == 0:
                    return False
                if self._ahead is not None:
                    self._ahead.advance(count)
                offset += count
                buffer = buffer[count:]
        except OSError as error:
            raise read_failure(os.path.join(self._folder, name), error) from error
        return True

    def fill_block(self, name: str, block: memoryview, offset: int, length: int) -> int | None:
        """Fill a block of memory with a range of a file, wherever it fits best.

        Args:
            name: of the file.
            block: begins at a page, and has room for the range and two pages.
            offset: in the file.
            length: of the range.

        Returns:
            Where in the block the range begins; None when the file ends before.

        Raises:
            CheckpointUnreadableError: the read fails.
        """
        if self._past_cache is not None:
            start = self._past_cache.read_into(self.descriptor(name), block, offset, length)
            if start is not None:
                return start
        with block[:length] as view:
            return 0 if self.fill(name, view, offset) else None

    def fill_summed(
        self, name: str, buffers: Sequence[memoryview], offset: int, checksum: Checksum | None
    ) -> int | None:
        """Fill all buffers from `offset` of a file on, and take their checksum on the way.

        Returns:
            The checksum, 0 if none is taken; None when the file ends before.

        Raises:
            CheckpointUnreadableError: the read fails.
        """
        stream = None if checksum is None else checksum.stream()
        for view in buffers:
            for start in range(0, view.nbytes, _BLOCK):
                block = view[start : start + _BLOCK]
                if not self.fill(name, block, offset):
                    return None
                if stream is not None:
                    stream.update(block)
                offset += block.nbytes
        return 0 if stream is None else stream.value()

    def checksum(self, name: str, offset: int, length: int, checksum: Checksum) -> int | None:
        """The checksum of a range of a file, or None when the file ends before."""
        buffer = memoryview(bytearray(min(length, _BLOCK)))
        stream, position = checksum.stream(), 0
        while position < length:
            view = buffer[: min(length - position, _BLOCK)]
            if not self.fill(name, view, offset + position):
                return None
            stream.update(view)
            position += view.nbytes
        return stream.value()

    def read_all(self, pieces: Sequence[Piece]) -> None:
        """Read many pieces in the order of the files, in as many threads as help. No file is opened meanwhile.

        Autograd is off meanwhile, so that leaves can be filled.

        Raises:
            Exception: the first one of `Piece.read`, after all threads have ended.
            CheckpointCorruptError, CheckpointUnreadableError: a file cannot be opened; nothing is read.
        """
        if not pieces:
            return
        ordered = sorted(pieces, key=attrgetter("file", "offset", "length"))
        ranges = [(self.descriptor(piece.file), piece.offset, piece.length) for piece in ordered]
        processors = os.cpu_count() or 1
        few = min(processors, _MOST_THREADS)
        in_memory, past_cache = self._look(ranges)
        if in_memory:
            _in_parallel(ordered, few)
        elif past_cache:
            with PastCache(self._folder, self._descriptors.values()) as self._past_cache:
                try:
                    _in_parallel(ordered, min(2 * processors, _MOST_DIRECT))  # half of them wait for the disk
                finally:
                    self._past_cache = None
        else:
            with ReadAhead(ranges) as self._ahead:
                try:
                    _in_parallel(ordered, few)
                finally:
                    self._ahead = None

    def _look(self, ranges: Sequence[tuple[int, int, int]]) -> tuple[bool, bool]:
        """Whether all of it is in memory, and whether it is better read past the page cache."""
        try:
            share = share_in_memory(ranges)
            if share is None:
                return False, False
            return share == 1, not self._shared and share < 0.5 and is_on_disk(self._folder)
        except OSError as error:
            logger.info("how much of %s is in memory cannot be known (%s)", self._folder, error)
            return False, False

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _in_parallel(pieces: Sequence[Piece], threads: int) -> None:
    def read_batch(batch: Sequence[Piece]) -> None:
        with torch.no_grad():  # holds for one thread alone
            for piece in batch:
                piece.read()

    threads = min(threads, len(pieces))
    if threads <= 1:
        read_batch(pieces)
        return
    goal = min(sum(piece.length for piece in pieces) / (threads * 4) + 1, _BATCH_BYTES)
    batches: list[list[Piece]] = [[]]
    filled = 0.0
    for piece in pieces:
        if filled >= goal:
            batches.append([])
            filled = 0
        batches[-1].append(piece)
        filled += piece.length

    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-read") as pool:
        for _ in pool.map(read_batch, batches):
            pass
