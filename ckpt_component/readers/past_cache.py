"""Reads past the page cache: from the disk into a small block of memory, and from there to where the bytes belong.

A computer that begins again after a crash has nothing of its checkpoint in memory. Through the page cache the bytes
need as much memory again, which a virtual machine first has to get from its host, page by page: 1.5 GB took 2.4 to 3 s
that way, and 1 s through blocks that stay in the processor's cache. Nor is anything pushed out of memory.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from ..storage.mounts import kind_of
from ..storage.regular import open_past_cache

logger = logging.getLogger(__name__)

#: Offsets and lengths are multiples of what a disk takes as a unit.
_PAGE = mmap.PAGESIZE
#: Read at a time. What is much larger has left the processor's cache before it is copied and summed.
_BLOCK_BYTES = 2 << 20
#: Below this the rest of the first and the last page, which is read for nothing, would be too much.
_LEAST_BYTES = 64 << 10
#: Of file systems on a disk of this computer. Those on a network want to read further ahead than a few blocks.
_ON_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs"})
#: Places that are looked at to tell whether files are in memory.
_SAMPLES = 256

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_FAILED = ctypes.c_void_p(-1).value


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
        self._blocks: list[mmap.mmap] = []
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
        if self._gave_up or length < _LEAST_BYTES:
            return None
        shift = offset % _PAGE
        with self._lent() as block:
            try:
                with memoryview(block)[: -(-(shift + length) // _PAGE) * _PAGE] as view:
                    count = min(os.preadv(self._direct[fd], [view], offset - shift) - shift, length)
            except OSError as error:
                self._give_up(error)
                return None
            if count > 0:
                # Others run meanwhile, as they would not with a slice.
                ctypes.memmove(_address(buffer), _address(block) + shift, count)
        return max(count, 0)

    @contextmanager
    def _lent(self) -> Iterator[mmap.mmap]:
        """Memory that begins at a page, of which nobody else knows for as long as the context is entered."""
        try:
            block = self._blocks.pop()
        except IndexError:
            block = mmap.mmap(-1, _BLOCK_BYTES + _PAGE)
        try:
            yield block
        finally:
            self._blocks.append(block)

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
        while self._blocks:
            self._blocks.pop().close()


def _address(buffer: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def is_worthwhile(folder: str, ranges: Sequence[tuple[int, int, int]]) -> bool:
    """Whether ranges of files lie on a disk of this computer, and for the most part not in its memory.

    Args:
        folder: where the files are.
        ranges: descriptor, offset and length.
    """
    total = sum(length for _, _, length in ranges)
    if total < _LEAST_BYTES:
        return False
    try:
        if kind_of(folder) not in _ON_DISK:
            return False
        answers = [found for fd, offsets in _samples(ranges, total).items() for found in _are_cached(fd, offsets)]
    except OSError as error:
        logger.info("%s is read through the page cache, of which nothing can be known (%s)", folder, error)
        return False
    return 2 * sum(answers) < len(answers)


def _samples(ranges: Sequence[tuple[int, int, int]], total: int) -> dict[int, list[int]]:
    """Offsets by descriptor, evenly over all ranges, which have `total` bytes."""
    found: dict[int, list[int]] = {}
    step = total / _SAMPLES
    ahead = 0.0
    for fd, offset, length in ranges:
        while ahead < length:
            found.setdefault(fd, []).append(offset + int(ahead))
            ahead += step
        ahead -= length
    return found


def _are_cached(fd: int, offsets: Sequence[int]) -> Iterator[bool]:
    """Of bytes of a file, whether they are in memory. The system answers yes for files that are somebody else's."""
    size = max(offsets) + 1
    # Nothing is read through this mapping, so a disk that fails cannot end the process by a signal.
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    try:
        answer = ctypes.create_string_buffer(1)
        for offset in offsets:
            if _libc.mincore(address + offset // _PAGE * _PAGE, 1, answer) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            yield answer.raw[0] & 1 == 1
    finally:
        _libc.munmap(address, size)
