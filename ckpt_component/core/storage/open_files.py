"""`OpenFiles`: the files of a folder, read through the page cache, or past it where that is faster."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import IO

from .. import libc
from ..outside import OUTSIDE, Outside
from ..pages import BLOCK_BYTES, ScratchBlock
from .file_set import GAP_BYTES, FileSet, RangeRead, extents_of
from .safe_open import forget, is_on_disk, open_past_cache, open_regular, read_failure

#: Number of pages to query over all files.
_SAMPLES = 256


def share_in_memory(ranges: Sequence[tuple[int, int, int]]) -> float | None:
    """Estimate the share of file ranges that is in the page cache, from 0 to 1, by sampling pages.

    Args:
        ranges: (descriptor, offset, length) of each range

    Returns:
        The share; None if there are no bytes, or for files that this process neither owns nor may write, for which
        Linux does not give the real answer.

    Raises:
        OSError: a file cannot be queried
    """
    offsets: dict[int, list[int]] = {}
    step = max(sum(length for _, _, length in ranges) / _SAMPLES, 1)
    position = 0.0  # of the next sample, relative to the start of the range
    for fd, offset, length in ranges:
        while position < length:
            offsets.setdefault(fd, []).append(offset + int(position))
            position += step
        position -= length
    if not offsets or not all(map(_may_query, offsets)):
        return None
    answers = [cached for fd in offsets for cached in are_cached(fd, offsets[fd])]
    return sum(answers) / len(answers)


def _may_query(fd: int) -> bool:
    """Linux gives the real answer only to processes that own or may write a file; to others it reports "cached"."""
    return os.fstat(fd).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)


def are_cached(fd: int, offsets: Sequence[int]) -> list[bool]:
    """Whether the bytes at these offsets of a file are in the page cache.

    Raises:
        OSError: the file cannot be queried
    """
    size = max(offsets) + 1
    # Nothing is read through this mapping, so a failing disk cannot kill the process with SIGBUS.
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == libc.MAP_FAILED:
        raise libc.last_error()
    answers, page = [], libc.string_buffer(1)
    try:
        for offset in offsets:
            if libc.mincore(address + offset // mmap.PAGESIZE * mmap.PAGESIZE, 1, page) != 0:
                raise libc.last_error()
            answers.append(page.raw[0] & 1 == 1)
    finally:
        libc.munmap(address, size)
    return answers


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
