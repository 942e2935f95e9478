"""How much of a file is in memory, so that the disk need not be asked for it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence

_PAGE = mmap.PAGESIZE
#: Places that are looked at, in all files together.
_SAMPLES = 256

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_FAILED = ctypes.c_void_p(-1).value


def share_in_memory(ranges: Sequence[tuple[int, int, int]]) -> float | None:
    """How much of ranges of files is in the page cache, from 0 to 1, by samples.

    Args:
        ranges: descriptor, offset and length.

    Returns:
        None where the system does not tell: files that this process may neither own nor write, or no bytes at all.

    Raises:
        OSError: a file cannot be looked at.
    """
    places = _samples(ranges)
    if not places or not all(map(_is_told, places)):
        return None
    answers = [found for fd, offsets in places.items() for found in _are_cached(fd, offsets)]
    return sum(answers) / len(answers)


def _samples(ranges: Sequence[tuple[int, int, int]]) -> dict[int, list[int]]:
    """Offsets by descriptor, evenly over all ranges."""
    found: dict[int, list[int]] = {}
    step = max(sum(length for _, _, length in ranges) / _SAMPLES, 1)
    ahead = 0.0
    for fd, offset, length in ranges:
        while ahead < length:
            found.setdefault(fd, []).append(offset + int(ahead))
            ahead += step
        ahead -= length
    return found


def _is_told(fd: int) -> bool:
    """Linux answers truthfully for who owns a file or may write it, and says for all others that it is in memory."""
    return os.fstat(fd).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)


def _are_cached(fd: int, offsets: Sequence[int]) -> Iterator[bool]:
    """Of bytes of a file, whether they are in memory."""
    size = max(offsets) + 1
    # Nothing is read through this mapping, so a disk that fails cannot end the process by a signal.
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        raise _failure()
    try:
        answer = ctypes.create_string_buffer(1)
        for offset in offsets:
            if _libc.mincore(address + offset // _PAGE * _PAGE, 1, answer) != 0:
                raise _failure()
            yield answer.raw[0] & 1 == 1
    finally:
        _libc.munmap(address, size)


def _failure() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
