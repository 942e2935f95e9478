"""The system call renameat2, which Python does not have (renameat2(2))."""

from __future__ import annotations

import errno
import os

NOREPLACE, EXCHANGE = 1, 2
_AT_FDCWD = -100


def rename_by(flag: int, source: str, target: str) -> bool:
    """Rename in one step; False where the file system or the system does not have the flag.

    Args:
        flag: `NOREPLACE`: fail if the target exists; `EXCHANGE`: exchange the two names.
        source: a path.
        target: the other path.

    Raises:
        OSError: the rename failed.
    """
    import ctypes  # 5 ms, and only a commit needs it

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), source, None, target)
