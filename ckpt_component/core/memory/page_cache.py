"""Query how much of a file is in the page cache and can be read without disk I/O."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

from . import libc

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
    answers, page = [], ctypes.create_string_buffer(1)
    try:
        for offset in offsets:
            if libc.mincore(address + offset // mmap.PAGESIZE * mmap.PAGESIZE, 1, page) != 0:
                raise libc.last_error()
            answers.append(page.raw[0] & 1 == 1)
    finally:
        libc.munmap(address, size)
    return answers
