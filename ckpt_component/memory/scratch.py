"""Memory that one system call spreads to many places. A file without a name, because calls spread what they read."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from ..errors import CheckpointError
from .huge_pages import HUGE_PAGE, address_of, align, make_huge, map_shared

logger = logging.getLogger(__name__)

_preadv = ctypes.CDLL(None, use_errno=True).preadv
_preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_preadv.restype = ctypes.c_ssize_t


class Block:
    """Memory whose bytes the system can spread.

    Args:
        nbytes: how much.

    Raises:
        CheckpointError: there is no memory or no descriptor for it.
    """

    def __init__(self, nbytes: int) -> None:
        try:
            self._descriptor = os.memfd_create("ckpt-run", os.MFD_CLOEXEC)
            try:
                size = align(nbytes, HUGE_PAGE)
                os.truncate(self._descriptor, size)
                self.view = map_shared(self._descriptor, size)
            except BaseException:
                os.close(self._descriptor)
                raise
        except OSError as error:
            raise CheckpointError(
                f"{nbytes / 1e6:.1f} MB of memory to read a checkpoint through were not to be had ({error}); free host "
                "memory or file descriptors (ulimit -n)."
            ) from error
        failed = make_huge(address_of(self.view), size)
        if failed:
            logger.debug("a block to read through is not in huge pages: %s", os.strerror(failed))

    def spread(self, table: int, pieces: int, nbytes: int, position: int) -> None:
        """Copy the bytes from `position` on to pieces of memory, in one system call.

        Args:
            table: where rows of address and length lie, each of 64 bits.
            pieces: how many those are; at most `MAX_BUFFERS`.
            nbytes: of all pieces.
            position: in the block.

        Raises:
            OSError: the system refuses.
        """
        while (copied := _preadv(self._descriptor, table, pieces, position)) != nbytes:
            code = ctypes.get_errno() if copied < 0 else errno.EIO
            if code != errno.EINTR:
                raise OSError(code, f"{os.strerror(code)}: {copied} of {nbytes} bytes were copied to tensors")

    def close(self) -> None:
        """Give the memory back."""
        self.view.release()
        os.close(self._descriptor)


class Blocks:
    """Blocks of one size that threads take in turns. A context manager; on its end none may be taken any more.

    Args:
        nbytes: of each.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: list[Block] = []

    @contextmanager
    def lent(self) -> Iterator[Block]:
        """A block of which nobody else knows, for as long as the context is entered."""
        try:
            block = self._free.pop()
        except IndexError:
            block = Block(self._nbytes)
        try:
            yield block
        finally:
            self._free.append(block)

    def close(self) -> None:
        """Give back the memory of all; none may be taken any more."""
        while self._free:
            self._free.pop().close()

    def __enter__(self) -> Blocks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
