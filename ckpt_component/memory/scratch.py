"""Memory to read through, whose bytes one system call copies to many places.

It is a file without a name, because the system calls that fill many places read from a file.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os

from ..errors import CheckpointError
from . import libc
from .huge_pages import HUGE_PAGE, make_huge, map_shared

logger = logging.getLogger(__name__)

#: Of a block: one huge page.
BLOCK_BYTES = HUGE_PAGE


class ScratchBlock:
    """`BLOCK_BYTES` of memory that begin at a page, as `view`.

    Args:
        huge: make them one huge page, which takes a while, and which direct I/O fills with fewer requests.

    Raises:
        CheckpointError: there is no memory or no file descriptor for it.
    """

    def __init__(self, *, huge: bool) -> None:
        try:
            self._descriptor = os.memfd_create("ckpt-read", os.MFD_CLOEXEC)
            try:
                os.posix_fallocate(self._descriptor, 0, BLOCK_BYTES)  # without it, too little memory is a signal
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
        """Copy the bytes from `position` on to pieces of memory, in one system call.

        Args:
            table: address of rows of address and length, each of 64 bits.
            pieces: how many those are; at most `libc.IOV_MAX`.
            nbytes: of all pieces.
            position: in the block.

        Raises:
            OSError: the system refuses.
        """
        while (copied := libc.preadv(self._descriptor, table, pieces, position)) != nbytes:
            code = libc.get_errno() if copied < 0 else errno.EIO
            if code != errno.EINTR:
                raise OSError(code, f"{os.strerror(code)}: {copied} of {nbytes} bytes were copied to tensors")

    def close(self) -> None:
        """Give the memory back."""
        self.view.release()
        os.close(self._descriptor)
