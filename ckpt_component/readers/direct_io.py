"""Direct I/O: reads past the page cache into a small block of memory, and from there to where the bytes belong.

After a restart nothing of a checkpoint is in memory. Reads through the page cache need as much memory again, which a
virtual machine first gets from its host page by page; a block that stays in the processor's cache needs none, and
nothing is pushed out of memory.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable

from ..memory.scratch import BLOCK_BYTES
from ..storage.fs_type import kind_of
from ..storage.safe_open import open_past_cache

logger = logging.getLogger(__name__)

#: Offsets and lengths are multiples of what a disk takes as a unit.
PAGE = mmap.PAGESIZE
#: Read at a time: with the rest of its first and its last page, it fits a block.
MAX_BYTES = BLOCK_BYTES - 2 * PAGE
#: Below this the rest of the first and the last page, which is read for nothing, would be too much.
_MIN_BYTES = 64 << 10
#: Local file systems. Those on a network want to read further ahead than a few blocks.
_ON_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs"})


def is_on_disk(folder: str) -> bool:
    """Whether a folder is on a local disk, judged by its file system's name."""
    return kind_of(folder) in _ON_DISK


class DirectReader:
    """Direct reads of files in one folder, for threads that read at the same time.

    Args:
        folder: where the files are.
        descriptors: of the files, open for reading; they stay the caller's.
    """

    def __init__(self, folder: str, descriptors: Iterable[int]) -> None:
        self._folder = folder
        self._direct: dict[int, int] = {}
        self._disabled = False
        try:
            for fd in descriptors:
                self._direct[fd] = open_past_cache(fd)
        except OSError as error:
            self._disable(error)

    def read(self, fd: int, block: memoryview, offset: int, length: int) -> int | None:
        """Read a range of a file. It begins at `offset % PAGE` in the block, whose beginning its first page fills.

        Args:
            fd: of the file.
            block: begins at a page, and is at least two pages longer than the range.
            offset: in the file.
            length: of the range.

        Returns:
            How many bytes of the range were read, fewer at the end of the file; None: it is to be read through the page
            cache, because it is short, or because direct I/O fails here.
        """
        if length < _MIN_BYTES or self._disabled:
            return None
        shift = offset % PAGE
        try:
            with block[: -(-(shift + length) // PAGE) * PAGE] as view:
                return max(min(os.preadv(self._direct[fd], [view], offset - shift) - shift, length), 0)
        except OSError as error:
            self._disable(error)
            return None

    def _disable(self, error: OSError) -> None:
        """Leave it to ordinary reads, which report what is wrong with the disk itself."""
        if not self._disabled:
            self._disabled = True
            logger.info("reading %s through the page cache: direct I/O failed (%s)", self._folder, error)

    def close(self) -> None:
        """Close its descriptors."""
        while self._direct:
            os.close(self._direct.popitem()[1])
