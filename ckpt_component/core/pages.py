"""Memory of this process: mapped blocks with huge pages, and buffers for one use."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import mmap
import os
from collections import deque

from ..errors import CheckpointError
from . import libc
from .libc import MADV_POPULATE_WRITE, address_of as address_of
from .outside import OUTSIDE, Outside

#: Alignment of direct I/O: addresses, offsets and lengths.
PAGE = 4096
HUGE_PAGE = 2 << 20
#: More threads would only wait for kernel locks.
_MAX_THREADS = 8
#: `F_ADD_SEALS` and `F_GET_SEALS`; and F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW: no process that has the memfd open can
#: truncate it, so that a mapping of it never raises SIGBUS. (From Python 3.11 on in `fcntl`.)
_ADD_SEALS, _GET_SEALS, _SIZE_STAYS = 1033, 1034, 0x1 | 0x2 | 0x4
#: Unit of allocation: takes about a millisecond.
_SLICE_BYTES = HUGE_PAGE
#: Between two of them, in seconds.
_LONGEST_REST = 0.1


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
        fd: descriptor of the memfd; it may be closed afterwards
        nbytes: number of bytes to map; at least 1
        writable: whether the mapping is writable

    Returns:
        The memory. It is unmapped with the last view of it.

    Raises:
        OSError: the memfd cannot be mapped
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


def map_sealed(fd: int, nbytes: int) -> memoryview | None:
    """Map a memfd for reading alone if its size is sealed, as `SharedPages` does it; arguments as for `map_shared`.

    Returns:
        The memory, read-only. None: another process may truncate it, and then reading the mapping would raise SIGBUS.

    Raises:
        OSError: it cannot be mapped
    """
    try:
        seals = fcntl.fcntl(fd, _GET_SEALS)
    except OSError:  # not a memfd
        return None
    if seals & _SIZE_STAYS != _SIZE_STAYS or os.fstat(fd).st_size < nbytes:
        return None
    return map_shared(fd, nbytes, writable=False)


def make_huge(address: int, nbytes: int) -> int:
    """Convert memory from `map_shared` to huge pages, allocating missing pages.

    Args:
        address: a multiple of `HUGE_PAGE`
        nbytes: number of bytes; a rest that does not fill a huge page is not converted

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


class SharedPages:
    """A memfd and its mapping, whose pages are allocated a slice at a time, by any number of threads.

    If pages were allocated on first use, running out of memory would raise SIGBUS, and the first save would have page
    faults. Slices are small: a thread of this process that maps or unmaps memory waits for the one that is allocated.

    Args:
        nbytes: size; at least 1
        outside: whose threads allocate them and wait for them

    Attributes:
        fd: descriptor of the memfd, which the caller closes
        memory: the memory, unmapped with the last view of it

    Raises:
        OSError: there is no free descriptor, or no address space
    """

    def __init__(self, nbytes: int, outside: Outside = OUTSIDE) -> None:
        self.fd = os.memfd_create("ckpt-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, _ADD_SEALS, _SIZE_STAYS)
            self.memory = map_shared(self.fd, nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._address = address_of(self.memory)
        self._nbytes = nbytes
        self._todo = deque(range(0, nbytes, _SLICE_BYTES))
        #: Where the slices begin that threads allocate now.
        self._running = set[int]()
        self._outside = outside
        self._changed = outside.condition()
        self._not_huge = 0
        self._error: OSError | None = None

    def allocate(self, threads: int, share: float = 1.0) -> int:
        """Allocate what is missing, huge pages if possible. When this returns or raises, no thread is at work.

        Args:
            threads: how many threads may clear pages, with those that are in this method already
            share: of its time that a thread works, as long as there is something left; it rests in between

        Returns:
            0, or the error number for which some of it is not in huge pages.

        Raises:
            OSError: there is not enough memory
        """
        helpers = min(threads, _MAX_THREADS, len(self._todo)) - 1
        with self._outside.pool(helpers, "ckpt-pages") as pool:
            for _ in range(helpers):
                pool.submit(self._work, share)
            self._work(share)
        with self._changed:
            while self._running:  # about a millisecond
                self._changed.wait()
        if self._error is not None:
            raise self._error
        return self._not_huge

    def wait(self, end: int, deadline: float) -> None:
        """Wait for the threads in `allocate`, until all before a position is there.

        Args:
            end: the position
            deadline: seconds of `Outside.now`

        Raises:
            OSError: there is not enough memory
            TimeoutError: it takes longer
        """
        with self._changed:
            while self._error is None and min([*self._running, *itertools.islice(self._todo, 1)], default=end) < end:
                left = deadline - self._outside.now()
                if left <= 0:
                    raise TimeoutError(errno.ETIMEDOUT, "it is not allocated in time")
                self._changed.wait(left)
            if self._error is not None:
                raise self._error

    def stop(self) -> None:
        """Let all threads in `allocate` return after their slice; the rest stays unallocated."""
        with self._changed:
            self._todo.clear()
            self._changed.notify_all()

    def _work(self, share: float) -> None:
        while True:
            with self._changed:
                if not self._todo:
                    return
                start = self._todo.popleft()
                self._running.add(start)
            began = self._outside.now()
            try:
                self._allocate_slice(start, min(_SLICE_BYTES, self._nbytes - start))
            except OSError as error:
                self._error = error
                self.stop()
            finally:
                with self._changed:
                    self._running.remove(start)
                    self._changed.notify_all()
            if share < 1:
                rest = (self._outside.now() - began) * (1 / share - 1)
                with self._changed:
                    self._changed.wait_for(lambda: not self._todo, min(rest, _LONGEST_REST))

    def _allocate_slice(self, start: int, nbytes: int) -> None:
        not_huge = make_huge(self._address + start, nbytes)
        code = advise(self._address + start, nbytes, MADV_POPULATE_WRITE)
        if code == errno.EINVAL:  # before Linux 5.14
            os.posix_fallocate(self.fd, start, nbytes)
        elif code:
            raise OSError(code, os.strerror(code))
        self._not_huge = self._not_huge or not_huge


def advise(address: int, nbytes: int, advice: int) -> int:
    """Call `madvise`, and repeat the call when a signal interrupts it.

    Returns:
        0, or the error number.
    """
    while libc.madvise(address, nbytes, advice) != 0:
        if libc.get_errno() != errno.EINTR:
            return libc.get_errno()
    return 0


logger = logging.getLogger("ckpt_component.memory")

#: Size of a block: one huge page.
BLOCK_BYTES = HUGE_PAGE


class ScratchBlock:
    """A page-aligned block of `BLOCK_BYTES` bytes, accessible as `view`.

    Args:
        huge: back it with one huge page, which takes longer to allocate but lets direct I/O use fewer requests

    Raises:
        CheckpointError: there is not enough memory or no free file descriptor
    """

    def __init__(self, *, huge: bool) -> None:
        try:
            self._descriptor = os.memfd_create("ckpt-read", os.MFD_CLOEXEC)
            try:
                os.posix_fallocate(self._descriptor, 0, BLOCK_BYTES)  # else running out of memory would raise SIGBUS
                if huge:
                    self.view = map_shared(self._descriptor, BLOCK_BYTES)
                else:
                    self.view = memoryview(mmap.mmap(self._descriptor, BLOCK_BYTES))
            except BaseException:
                os.close(self._descriptor)
                raise
        except OSError as error:
            raise CheckpointError(
                f"could not allocate a {BLOCK_BYTES / 1e6:.1f} MB read buffer ({error}); free host memory or file "
                "descriptors (ulimit -n)."
            ) from error
        code = make_huge(libc.address_of(self.view), BLOCK_BYTES) if huge else 0
        if code:
            logger.debug("a read buffer is not in huge pages: %s", os.strerror(code))

    def scatter(self, table: int, pieces: int, nbytes: int, position: int) -> None:
        """Copy the bytes from `position` on to many pieces of memory with one system call.

        Args:
            table: address of a table of the pieces: rows of address and length, 64 bits each
            pieces: number of pieces; at most `libc.IOV_MAX`
            nbytes: total size of all pieces
            position: position in the block

        Raises:
            OSError: the system call failed
        """
        while (copied := libc.preadv(self._descriptor, table, pieces, position)) != nbytes:
            code = libc.get_errno() if copied < 0 else errno.EIO
            if code != errno.EINTR:
                raise OSError(code, f"{os.strerror(code)}: {copied} of {nbytes} bytes were copied to tensors")

    def close(self) -> None:
        """Free the memory."""
        self.view.release()
        os.close(self._descriptor)


def give_back_freed() -> None:
    """Return freed memory to the system: planning frees much, which the C library would keep."""
    if libc.malloc_trim is not None:
        libc.malloc_trim(0)
