"""Huge pages for memory that processes share, also where the system gives none by itself.

For a memfd the system decides by `/sys/kernel/mm/transparent_hugepage/shmem_enabled`, which is `never` nearly
everywhere; since Linux 6.1 it can be asked for them all the same (`MADV_COLLAPSE`). Direct I/O gets by with a request
where it took many then. On a virtio disk whose ring holds 254 pages, writes went from 1.4 to 1.8 GB/s up to 2.1 to 2.7,
and a loop on the processor of the disk's interrupts lost 2 ms to a save of 1.5 GB instead of 46: most of that was a
kernel thread that goes before everything else, to hand over what had not fitted into the ring.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

HUGE_PAGE = 2 << 20
#: Of Linux 5.14 and 6.1; `mmap` has no names for them.
MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(address: int, nbytes: int, advice: int) -> int:
    """`madvise`, until no signal interrupts it.

    Returns:
        0, or the number of the error.
    """
    while _libc.madvise(address, nbytes, advice) != 0:
        if ctypes.get_errno() != errno.EINTR:
            return ctypes.get_errno()
    return 0


def collapse(fd: int, start: int, nbytes: int) -> int:
    """Make huge pages of a part of a memfd; what is not there yet is zero, and there.

    The system puts a file at addresses where huge pages cannot be mapped, so this is done through a mapping of its own.
    The pages stay huge for all others.

    Args:
        fd: the memfd, at least `start + nbytes` long.
        start: a multiple of `HUGE_PAGE`.
        nbytes: of the part; what does not fill a huge page is left as it is.

    Returns:
        0, or the number of the error where the system has none (left): EINVAL before Linux 6.1 or where they are off,
        ENOMEM or EBUSY where memory is short or in pieces. Everything before the failure is done.

    Raises:
        OSError: nothing can be mapped.
    """
    nbytes -= nbytes % HUGE_PAGE
    if nbytes == 0:
        return 0
    room = nbytes + HUGE_PAGE
    held = _map(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    try:
        address = -(-held // HUGE_PAGE) * HUGE_PAGE
        _map(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, start)
        for position in range(0, nbytes, HUGE_PAGE):
            failed = advise(address + position, mmap.PAGESIZE, MADV_POPULATE_WRITE)  # nothing is made of nothing
            if failed:
                return failed
        return advise(address, nbytes, _MADV_COLLAPSE)
    finally:
        _libc.munmap(held, room)


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, offset)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)
