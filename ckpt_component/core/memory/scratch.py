"""A read buffer whose bytes can be scattered to many destinations by one system call.

The buffer is a memfd, because `preadv`, which fills many destinations, reads from a file.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os

from ...errors import CheckpointError
from . import libc
from .huge_pages import HUGE_PAGE, make_huge, map_shared

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
