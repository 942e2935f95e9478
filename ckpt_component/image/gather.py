"""Many small copies in one system call, during which other threads may run Python."""

from __future__ import annotations

import ctypes
import logging
import os

logger = logging.getLogger(__name__)

#: Of one call: IOV_MAX of Linux.
MOST_PIECES = 1024
#: Of the table that the call takes: address and length, 64 bits each.
ROW_BYTES = 16

# Made for the memory of another process; for its own it needs no right. Absent from some C libraries.
_writev = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_writev", None)
if _writev is not None:
    _writev.argtypes = (
        ctypes.c_int,
        *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong),
        ctypes.c_ulong,
    )
    _writev.restype = ctypes.c_ssize_t


class Gather:
    """Copies pieces of this process's memory to other places in it; says no where the system does not allow that."""

    def __init__(self) -> None:
        self._allowed = True

    def __call__(self, origins: int, targets: int, pieces: int, nbytes: int) -> bool:
        """Copy each piece to its target.

        Args:
            origins: where the table of the pieces lies: rows of address and length.
            targets: where the table of their targets lies: as many, of the same lengths, elsewhere in memory.
            pieces: how many there are; at most `MOST_PIECES`.
            nbytes: of all pieces together.

        Returns:
            Whether it is done. False: nothing is known of what was copied, do it in another way.
        """
        if not self._allowed:
            return False
        if _writev is None:
            return self._refused("this C library has no process_vm_writev")
        copied = _writev(os.getpid(), origins, pieces, targets, pieces, 0)
        if copied == nbytes:
            return True
        return self._refused(os.strerror(ctypes.get_errno()) if copied < 0 else f"{copied} of {nbytes} bytes came")

    def _refused(self, why: str) -> bool:
        self._allowed = False
        logger.warning("small tensors are copied one by one, which takes longer: process_vm_writev fails (%s)", why)
        return False
