"""The pages of an arena: huge ones where the system has them, and all of them there before anything is copied."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from .layout import align

#: Of Linux 5.14; `mmap` has no name for it.
_MADV_POPULATE_WRITE = 23
_HUGE_PAGE = 2 << 20
#: More would wait for the kernel's locks.
_MOST_THREADS = 8

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def want_huge_pages(block: mmap.mmap) -> None:
    """2 MB at a time where the system gives them: fewer page faults, and copies that miss the TLB less often."""
    try:
        block.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without them
            raise


def reserve(block: mmap.mmap, fd: int, nbytes: int) -> None:
    """Take a memfd's pages now: one that is only sized kills the process by SIGBUS when memory runs out.

    Through the mapping, which has the kernel use huge pages where they are wanted, and leaves no page fault to the
    first save; by the descriptor where the kernel is older than 5.14. To clear the pages takes most of the time, so
    that several threads share it.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    threads = min(torch.get_num_threads(), _MOST_THREADS)
    share = align(-(-nbytes // threads), _HUGE_PAGE)

    def populate(start: int) -> int:
        length = min(share, nbytes - start)
        while _madvise(address + start, length, _MADV_POPULATE_WRITE) != 0:
            if ctypes.get_errno() != errno.EINTR:
                return ctypes.get_errno()
        return 0

    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-pages") as pool:
        failures = {code for code in pool.map(populate, range(0, nbytes, share)) if code}
    if failures == {errno.EINVAL}:
        os.posix_fallocate(fd, 0, nbytes)
    elif failures:
        code = failures.pop()
        raise OSError(code, os.strerror(code))
