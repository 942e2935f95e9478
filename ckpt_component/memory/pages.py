"""The pages of an arena: huge ones where the system has them, and all of them there before anything is copied."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from .huge_pages import HUGE_PAGE, MADV_POPULATE_WRITE, address_of, advise, align, make_huge

logger = logging.getLogger(__name__)

#: More would wait for the kernel's locks.
_MOST_THREADS = 8


def want_huge_pages(block: mmap.mmap) -> None:
    """2 MB at a time where the system gives them: fewer page faults, and copies that miss the TLB less often."""
    try:
        block.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without them
            raise


def reserve(memory: memoryview, fd: int) -> None:
    """Take a memfd's pages now: one that is only sized kills the process by SIGBUS when memory runs out.

    Through the mapping, which leaves no page fault to the first save; by the descriptor where the kernel is older than
    5.14. To clear the pages takes most of the time, so that several threads share it.
    """
    address, nbytes = address_of(memory), memory.nbytes
    threads = min(torch.get_num_threads(), _MOST_THREADS)
    share = align(-(-nbytes // threads), HUGE_PAGE)

    def take(start: int) -> tuple[int, int]:
        part = address + start, min(share, nbytes - start)
        return make_huge(*part), advise(*part, MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-pages") as pool:
        taken = list(pool.map(take, range(0, nbytes, share)))
    small = {code for code, _ in taken if code}
    if small:
        logger.info("the checkpoint arena is not all in huge pages: %s", os.strerror(small.pop()))
    failures = {code for _, code in taken if code}
    if failures == {errno.EINVAL}:
        os.posix_fallocate(fd, 0, nbytes)
    elif failures:
        code = failures.pop()
        raise OSError(code, os.strerror(code))
