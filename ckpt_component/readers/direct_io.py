"""Reads past the page cache: from the disk into a small block of memory, and from there to where the bytes belong.

A computer that begins again after a crash has nothing of its checkpoint in memory. Through the page cache the bytes
need as much memory again, which a virtual machine first has to get from its host, page by page: 1.5 GB took 2.4 to 3 s
that way, and 0.6 to 0.9 s through blocks that stay in the processor's cache. Nor is anything pushed out of memory.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterable
from types import TracebackType

from ..memory.huge_pages import address_of
from ..memory.scratch import Blocks
from ..storage.fs_type import kind_of
from ..storage.safe_open import open_past_cache

logger = logging.getLogger(__name__)

#: Offsets and lengths are multiples of what a disk takes as a unit.
PAGE = mmap.PAGESIZE
#: Read at a time. What is much larger has left the processor's cache before it is copied and summed.
_BLOCK_BYTES = 2 << 20
#: Below this the rest of the first and the last page, which is read for nothing, would be too much.
_LEAST_BYTES = 64 << 10
#: Of file systems on a disk of this computer. Those on a network want to read further ahead than a few blocks.
_ON_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs"})


def is_on_disk(folder: str) -> bool:
    """Whether a folder is on a disk of this computer, as far as its file system's name tells."""
    return kind_of(folder) in _ON_DISK


class PastCache:
    """Direct reads of files in one folder, for threads that read at the same time. A context manager.

    Args:
        folder: where the files are.
        descriptors: of the files, open for reading; they stay the caller's.
    """

    def __init__(self, folder: str, descriptors: Iterable[int]) -> None:
        self._folder = folder
        self._direct: dict[int, int] = {}
        self._gave_up = False
        self._blocks = Blocks(_BLOCK_BYTES + 2 * PAGE)
        try:
            for fd in descriptors:
                self._direct[fd] = open_past_cache(fd)
        except OSError as error:
            self._give_up(error)

    def read(self, fd: int, buffer: memoryview, offset: int) -> int | None:
        """Read bytes of a file.

        Args:
            fd: of the file.
            buffer: filled from its beginning on.
            offset: in the file.

        Returns:
            How many bytes were read, 0 at the end of the file; None: they are to be read in the ordinary way, because
            they are few, or because this one fails here.
        """
        length = min(buffer.nbytes, _BLOCK_BYTES)
        if length < _LEAST_BYTES:
            return None
        with self._blocks.lent() as block:
            count = self._read_pages(fd, block.view, offset, length)
            if count:
                # Others run meanwhile, as they would not with a slice.
                ctypes.memmove(address_of(buffer), address_of(block.view) + offset % PAGE, count)
        return count

    def read_into(self, fd: int, block: memoryview, offset: int, length: int) -> int | None:
        """Read a range of a file where its first page ends up at the beginning of memory, which saves a copy.

        Args:
            fd: of the file.
            block: begins at a page, and has room for the range and two pages.
            offset: in the file.
            length: of the range.

        Returns:
            Where in the block the range begins; None: it is to be read in the ordinary way, because it is short, the
            file ends before it does, or this one fails here.
        """
        if length < _LEAST_BYTES or self._read_pages(fd, block, offset, length) != length:
            return None
        return offset % PAGE

    def _read_pages(self, fd: int, block: memoryview, offset: int, length: int) -> int | None:
        """Read all pages of a range; returns how many bytes of it were there, None where that fails."""
        if self._gave_up:
            return None
        shift = offset % PAGE
        try:
            with block[: -(-(shift + length) // PAGE) * PAGE] as view:
                return max(min(os.preadv(self._direct[fd], [view], offset - shift) - shift, length), 0)
        except OSError as error:
            self._give_up(error)
            return None

    def _give_up(self, error: OSError) -> None:
        """Leave it to ordinary reads. What is wrong with the disk itself, they will tell."""
        if not self._gave_up:
            self._gave_up = True
            logger.info("%s is read through the page cache, because direct reads fail there (%s)", self._folder, error)

    def __enter__(self) -> PastCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._direct:
            os.close(self._direct.popitem()[1])
        self._blocks.close()
