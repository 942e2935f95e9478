"""Pages of memory: alignment, shared mappings, and huge pages. Standard library alone.

Huge pages take fewer page faults and TLB misses, and direct I/O needs fewer requests. For a memfd the system decides
about them by `/sys/kernel/mm/transparent_hugepage/shmem_enabled`, which is `never` nearly everywhere; since Linux 6.1
they can be requested all the same (`MADV_COLLAPSE`).
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from . import libc
from .libc import MADV_POPULATE_WRITE
from .libc import address_of as address_of

logger = logging.getLogger(__name__)

#: What direct I/O is aligned to: addresses, offsets and lengths.
PAGE = 4096
HUGE_PAGE = 2 << 20
#: More threads would wait for the kernel's locks.
_MAX_THREADS = 8


def align(position: int, boundary: int = PAGE) -> int:
    """The next multiple of `boundary` at or after `position`."""
    return -(-position // boundary) * boundary


def align_down(position: int, boundary: int = PAGE) -> int:
    """The last multiple of `boundary` at or before `position`."""
    return position // boundary * boundary


def map_private(nbytes: int) -> mmap.mmap:
    """Memory of this process alone, which begins at a page, in huge pages where the system has them."""
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        block.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without them
            raise
    return block


def map_shared(fd: int, nbytes: int, *, writable: bool = True) -> memoryview:
    """Map a memfd at an address at which its huge pages can be mapped as such; the system would choose any.

    Args:
        fd: of the memfd; it may be closed afterwards.
        nbytes: how much of it to map; more than 0.
        writable: whether this mapping can be written to.

    Returns:
        The memory. It is unmapped with the last view of it.

    Raises:
        OSError: it cannot be mapped.
    """
    reserved = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | libc.MAP_NORESERVE)
    address = address_of(memoryview(reserved))
    start = -address % HUGE_PAGE
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    # Replaces a part of the reserved mapping, and so is unmapped together with it.
    if libc.mmap(address + start, nbytes, protection, mmap.MAP_SHARED | libc.MAP_FIXED, fd, 0) == libc.MAP_FAILED:
        raise libc.last_error()
    memory = memoryview(reserved)[start : start + nbytes]
    return memory if writable else memory.toreadonly()


def make_huge(address: int, nbytes: int) -> int:
    """Turn memory of `map_shared` into huge pages, allocating what is not there yet.

    Args:
        address: a multiple of `HUGE_PAGE`.
        nbytes: from there on; what does not fill a huge page is left as it is.

    Returns:
        0, or the error number where the system has none (left): EINVAL before Linux 6.1 or where they are off, ENOMEM,
        EBUSY or EAGAIN where memory is short or fragmented. The pages converted before that stay.
    """
    nbytes = align_down(nbytes, HUGE_PAGE)
    advise(address, nbytes, mmap.MADV_HUGEPAGE)  # before Linux 6.1 some systems give them where this is set
    for start in range(address, address + nbytes, HUGE_PAGE):
        code = advise(start, mmap.PAGESIZE, MADV_POPULATE_WRITE)  # collapsing needs at least one page to be there
        if code:
            return code
    return advise(address, nbytes, libc.MADV_COLLAPSE) if nbytes else 0


def allocate_pages(memory: memoryview, fd: int, threads: int) -> None:
    """Allocate a memfd's pages now: one that is only sized kills the process by SIGBUS when memory runs out.

    Done through the mapping, so that the first save has no page faults, and by several threads, because clearing the
    pages takes most of the time; through the descriptor on kernels before 5.14.

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
    if not_huge:
        logger.info("the checkpoint arena is not all in huge pages: %s", os.strerror(not_huge.pop()))
    failures = {code for _, code in codes if code}
    if failures == {errno.EINVAL}:
        os.posix_fallocate(fd, 0, nbytes)
    elif failures:
        code = failures.pop()
        raise OSError(code, os.strerror(code))


def advise(address: int, nbytes: int, advice: int) -> int:
    """Call `madvise`, again when a signal interrupts it.

    Returns:
        0, or the error number.
    """
    while libc.madvise(address, nbytes, advice) != 0:
        if libc.get_errno() != errno.EINTR:
            return libc.get_errno()
    return 0
