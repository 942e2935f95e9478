"""Direct I/O: reads bypass the page cache into a small block of memory and are copied from there.

After a restart no part of a checkpoint is in memory. Reads through the page cache allocate its whole size again, and a
virtual machine gets that memory from its host page by page. A block that stays in the processor's cache avoids this,
and evicts nothing from the page cache.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable

from ..memory.scratch import BLOCK_BYTES
from .safe_open import open_past_cache

logger = logging.getLogger("ckpt_component.storage")

#: Offsets and lengths are multiples of this.
PAGE = mmap.PAGESIZE
#: Most bytes per read: together with the rest of the first and last page they fit a block.
MAX_BYTES = BLOCK_BYTES - 2 * PAGE
#: Shorter reads would spend too much on the unneeded rest of their first and last page.
_MIN_BYTES = 64 << 10


class DirectReader:
    """Direct reads of files in one folder. Thread-safe.

    Args:
        folder: the folder of the files
        descriptors: descriptors of the files, open for reading. The caller closes them.
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
        """Read a range of a file into a block. Whole pages are read, so the range begins at `offset % PAGE` there.

        Args:
            fd: descriptor of the file
            block: a page-aligned buffer, at least two pages longer than the range
            offset: start of the range in the file
            length: length of the range

        Returns:
            How many bytes of the range were read, fewer at the end of the file; None: read it through the page cache
            instead, because the range is short or direct I/O fails here.
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
        """Fall back to ordinary reads, which report any fault of the disk itself."""
        if not self._disabled:
            self._disabled = True
            logger.info("reading %s through the page cache: direct I/O failed (%s)", self._folder, error)

    def close(self) -> None:
        """Close its descriptors."""
        while self._direct:
            os.close(self._direct.popitem()[1])
