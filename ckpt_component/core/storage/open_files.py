"""`OpenFiles`: the files of a folder, read through the page cache, or past it where that is faster."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import IO

from ..memory import libc
from ..memory.page_cache import share_in_memory
from ..memory.scratch import ScratchBlock
from ..outside import OUTSIDE, Outside
from .direct_io import MAX_BYTES, PAGE, DirectReader
from .file_set import GAP_BYTES, FileSet, RangeRead, extents_of
from .safe_open import forget, is_on_disk, open_regular, read_failure

logger = logging.getLogger("ckpt_component.storage")

_MAX_THREADS = 4
#: Used with direct I/O, where threads wait for the disk because nothing is read ahead.
_MAX_DIRECT_THREADS = 8


class OpenFiles(FileSet):
    """The files of a folder.

    Args:
        folder: folder of the checkpoint
        shared: whether other processes on this host read the same files at the same time, so that the page cache
            serves them all. If not, uncached data is read with direct I/O.
        outside: that of its storage
    """

    def __init__(self, folder: str, *, shared: bool = True, outside: Outside = OUTSIDE) -> None:
        super().__init__(folder, outside)
        self._shared = shared
        self._descriptors: dict[str, int] = {}
        self._direct: DirectReader | None = None
        self._reads_ahead = False

    def descriptor(self, name: str) -> int:
        """A descriptor for reading, owned by this object; raises as `size`."""
        if name not in self._descriptors:
            self._descriptors[name] = self._open(name)
        return self._descriptors[name]

    def _open(self, name: str) -> int:
        path = self._path(name)
        try:
            return open_regular(path)
        except OSError as error:
            raise read_failure(path, error) from error

    def size(self, name: str) -> int:
        return os.fstat(self.descriptor(name)).st_size

    def stream(self, name: str) -> IO[bytes]:
        return os.fdopen(self._open(name), "rb")

    def _new_block(self) -> ScratchBlock:
        return ScratchBlock(huge=self._direct is not None)

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
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

    def _forget(self, name: str, offset: int, length: int) -> None:
        forget(self.descriptor(name), offset, length)

    def _choose_ways(self, ordered: Sequence[RangeRead]) -> int:
        """Choose direct I/O, read-ahead or plain reads by what the page cache holds."""
        share, direct = None, False
        try:
            share = share_in_memory([(self.descriptor(read.file), read.offset, read.length) for read in ordered])
            direct = not self._shared and share is not None and share < 0.5 and is_on_disk(self._folder)
        except OSError as error:
            logger.info("cannot query the page cache for %s (%s)", self._folder, error)
        self._reads_ahead = not direct and share != 1
        processors = os.cpu_count() or 1
        if direct:
            self._direct = DirectReader(self._folder, self._descriptors.values())
            return min(2 * processors, _MAX_DIRECT_THREADS, len(ordered))  # half of them wait for the disk
        return min(processors, _MAX_THREADS, len(ordered))

    def _before(self, batches: Sequence[Sequence[RangeRead]], number: int, threads: int) -> None:
        for upcoming in range(number + threads if number else 0, number + threads + 1):
            if self._reads_ahead and upcoming < len(batches):
                self._read_ahead(batches[upcoming])

    def _read_ahead(self, batch: Sequence[RangeRead]) -> None:
        """Let the disk read a batch into the page cache while other batches are checksummed and copied."""
        try:
            for name, start, end in extents_of(batch, GAP_BYTES):
                os.posix_fadvise(self.descriptor(name), start, end - start, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            # This is only advice: if the file itself is unreadable, the read fails.
            self._reads_ahead = False
            logger.info("read-ahead disabled for %s: posix_fadvise failed (%s)", self._folder, error)

    def __exit__(self, *exception: object) -> None:
        if self._direct is not None:
            self._direct.close()
        super().__exit__(*exception)
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
