"""How much of a file is in the page cache, so that the disk need not be asked for it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

from . import libc

#: Pages that are looked at, in all files together.
_SAMPLES = 256


def share_in_memory(ranges: Sequence[tuple[int, int, int]]) -> float | None:
    """How much of ranges of files is in the page cache, from 0 to 1, by samples.

    Args:
        ranges: descriptor, offset and length.

    Returns:
        None where the system does not tell: files that this process may neither own nor write, or no bytes at all.

    Raises:
        OSError: a file cannot be queried.
    """
    offsets: dict[int, list[int]] = {}
    step = max(sum(length for _, _, length in ranges) / _SAMPLES, 1)
    position = 0.0  # of the next sample, from the start of a range
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
    """Linux answers correctly to those who own or may write a file, and reports to all others that it is cached."""
    return os.fstat(fd).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)


def are_cached(fd: int, offsets: Sequence[int]) -> list[bool]:
    """Of bytes of a file, whether they are in memory.

    Raises:
        OSError: the file cannot be queried.
    """
    size = max(offsets) + 1
    # Nothing is read through this mapping, so a disk that fails cannot end the process by a signal.
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == libc.MAP_FAILED:
        raise libc.last_error()
    answers, page = [], ctypes.create_string_buffer(1)
    try:
        for offset in offsets:
            if libc.mincore(address + offset // mmap.PAGESIZE * mmap.PAGESIZE, 1, page) != 0:
                raise libc.last_error()
            answers.append(page.raw[0] & 1 == 1)
    finally:
        libc.munmap(address, size)
    return answers
