"""Memory pages: alignment, shared mappings and huge pages. Imports only the standard library.

Huge pages cause fewer page faults and TLB misses, and direct I/O needs fewer requests. For a memfd they are controlled
by `/sys/kernel/mm/transparent_hugepage/shmem_enabled`, which is `never` nearly everywhere; since Linux 6.1 they can be
requested nevertheless (`MADV_COLLAPSE`).
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from . import libc
from .libc import MADV_POPULATE_WRITE
from .libc import address_of as address_of

#: Alignment of direct I/O: addresses, offsets and lengths.
PAGE = 4096
HUGE_PAGE = 2 << 20
#: More threads would only wait for kernel locks.
_MAX_THREADS = 8


def align(position: int, boundary: int = PAGE) -> int:
    """The next multiple of `boundary` at or after `position`."""
    return -(-position // boundary) * boundary


def align_down(position: int, boundary: int = PAGE) -> int:
    """The last multiple of `boundary` at or before `position`."""
    return position // boundary * boundary


def map_private(nbytes: int) -> mmap.mmap:
    """Map private, page-aligned memory, in huge pages if the system has them."""
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        block.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without huge pages
            raise
    return block


def map_shared(fd: int, nbytes: int, *, writable: bool = True) -> memoryview:
    """Map a memfd at an address aligned to huge pages, which the system would not guarantee.

    Args:
        fd: descriptor of the memfd; it may be closed afterwards.
        nbytes: number of bytes to map; at least 1.
        writable: whether the mapping is writable.

    Returns:
        The memory. It is unmapped with the last view of it.

    Raises:
        OSError: the memfd cannot be mapped.
    """
    reserved = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | libc.MAP_NORESERVE)
    address = address_of(memoryview(reserved))
    start = -address % HUGE_PAGE
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    # This replaces a part of the reserved mapping and is unmapped together with it.
    if libc.mmap(address + start, nbytes, protection, mmap.MAP_SHARED | libc.MAP_FIXED, fd, 0) == libc.MAP_FAILED:
        raise libc.last_error()
    memory = memoryview(reserved)[start : start + nbytes]
    return memory if writable else memory.toreadonly()


def make_huge(address: int, nbytes: int) -> int:
    """Convert memory from `map_shared` to huge pages, allocating missing pages.

    Args:
        address: a multiple of `HUGE_PAGE`.
        nbytes: number of bytes; a rest that does not fill a huge page is not converted.

    Returns:
        0, or an error number: EINVAL before Linux 6.1 or where huge pages are disabled; ENOMEM, EBUSY or EAGAIN when
        memory is short or fragmented. Pages converted before the error stay huge.
    """
    nbytes = align_down(nbytes, HUGE_PAGE)
    advise(address, nbytes, mmap.MADV_HUGEPAGE)  # sufficient on some systems before Linux 6.1
    for start in range(address, address + nbytes, HUGE_PAGE):
        code = advise(start, mmap.PAGESIZE, MADV_POPULATE_WRITE)  # MADV_COLLAPSE needs at least one allocated page
        if code:
            return code
    return advise(address, nbytes, libc.MADV_COLLAPSE) if nbytes else 0


def allocate_shared(nbytes: int, threads: int) -> tuple[int, memoryview, int]:
    """Make a memfd, map it, and allocate its pages, huge ones if possible.

    Args:
        nbytes: size; at least 1.
        threads: how many threads may clear pages.

    Returns:
        Its descriptor, which the caller closes; the memory, unmapped with the last view of it; and 0, or the error
        number for which some of it is not in huge pages.

    Raises:
        OSError: there is not enough memory.
    """
    fd = os.memfd_create("ckpt-arena", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        memory = map_shared(fd, nbytes)
        return fd, memory, allocate_pages(memory, fd, threads)
    except BaseException:
        os.close(fd)
        raise


def allocate_pages(memory: memoryview, fd: int, threads: int) -> int:
    """Allocate the pages of a memfd: if they were allocated on first use, running out of memory would raise SIGBUS.

    The pages are allocated through the mapping, so that the first save has no page faults, and by several threads,
    because clearing them takes most of the time. Before Linux 5.14 they are allocated through the descriptor.

    Returns:
        0, or an error number for which some of it is not in huge pages.

    Raises:
        OSError: there is not enough memory.
    """
    address, nbytes = address_of(memory), memory.nbytes
    threads = min(threads, _MAX_THREADS)
    share = align(-(-nbytes // threads), HUGE_PAGE)

    def allocate(start: int) -> tuple[int, int]:
        part = address + start, min(share, nbytes - start)
        return make_huge(*part), advise(*part, MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-pages") as pool:
        codes = list(pool.map(allocate, range(0, nbytes, share)))
    not_huge = {code for code, _ in codes if code}
    failures = {code for _, code in codes if code}
    if failures == {errno.EINVAL}:
        os.posix_fallocate(fd, 0, nbytes)
    elif failures:
        code = failures.pop()
        raise OSError(code, os.strerror(code))
    return max(not_huge, default=0)


def advise(address: int, nbytes: int, advice: int) -> int:
    """Call `madvise`, and repeat the call when a signal interrupts it.

    Returns:
        0, or the error number.
    """
    while libc.madvise(address, nbytes, advice) != 0:
        if libc.get_errno() != errno.EINTR:
            return libc.get_errno()
    return 0
