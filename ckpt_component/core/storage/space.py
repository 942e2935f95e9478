"""Disk space for a checkpoint: checked before a write, and reported when it runs out during one."""

from __future__ import annotations

import errno
import os

from ...errors import CheckpointStorageFullError
from .storage import Storage

#: The disk, a quota, or the maximum size of a file is exceeded.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def refuse_without_room(storage: Storage, target: str, needed: int, margin: int) -> None:
    """Raise CheckpointStorageFullError when a checkpoint does not fit into the free space.

    Args:
        storage: the storage
        target: path of the planned checkpoint
        needed: bytes of all ranks' files
        margin: bytes that must stay free (`min_free_bytes`)
    """
    free = storage.free_bytes(os.path.dirname(target))
    if free is None or free >= needed + margin:
        return
    reserve = f" and {amount(margin)} are to stay free (checkpoint.min_free_bytes)" if margin else ""
    raise CheckpointStorageFullError(
        f"{target} needs {amount(needed)}{reserve}, and {amount(free)} are free there. {_advice(errno.ENOSPC)}",
        errno.ENOSPC,
    )


def full_text(storage: Storage, target: str, needed: int, code: int) -> str:
    """The end of an error message about a full disk: the numbers, and what to do.

    Args:
        storage: the storage
        target: path of the checkpoint that could not be saved
        needed: bytes that the checkpoint needs
        code: errno of the write
    """
    free = storage.free_bytes(os.path.dirname(target))
    now = "" if free is None else f", and {amount(free)} are free there now"
    return f"It needs {amount(needed)}{now}. {_advice(code)}"


def amount(nbytes: int) -> str:
    """Format a number of bytes: `1.20 TB`, `1.50 GB`, `12.34 MB`, `800 bytes`."""
    if nbytes >= 1e12:
        return f"{nbytes / 1e12:.2f} TB"
    if nbytes >= 1e8:
        return f"{nbytes / 1e9:.2f} GB"
    return f"{nbytes / 1e6:.2f} MB" if nbytes >= 1e5 else f"{nbytes} bytes"


def rate(bytes_per_second: float) -> str:
    """Format a rate: `1.23 GB/s`, `159 MB/s`, `0.30 MB/s`."""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.2f} GB/s"
    return f"{bytes_per_second / 1e6:.{0 if bytes_per_second >= 1e7 else 2}f} MB/s"


def _advice(code: int) -> str:
    if code == errno.EFBIG:
        return "The file is too large: raise checkpoint.writer.workers, which makes more files, or ulimit -f."
    quota = "or have the quota raised, " if code == errno.EDQUOT else ""
    return f"Delete what is not needed there, {quota}or lower checkpoint.keep.last."
