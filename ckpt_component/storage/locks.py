"""Locks on folders, by which a living process is told from a dead one: the kernel gives them back when it dies."""

from __future__ import annotations

import errno
import fcntl
import logging
import os

logger = logging.getLogger(__name__)

#: What a lock is answered where the file system has none: NFS without lockd, Lustre without `-o flock`, some FUSE.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


class FolderLocks:
    """The part of `FsOps` that locks.

    Args:
        warns: whether it warns, once, where the file system has no locks. A writer process leaves that to its trainer.
    """

    def __init__(self, *, warns: bool = True) -> None:
        self._warns = warns

    def lock_shared(self, path: str) -> int | None:
        """Open a folder and hold a shared lock on it, which tells others that its owner lives.

        Returns a descriptor; closing it, or the death of the process, gives the lock back. None: there are no locks
        here.

        Raises:
            BlockingIOError: another process looks at this moment whether the folder is locked.
        """
        fd = self._open_folder(path)
        try:
            locked = self._try_lock(fd, fcntl.LOCK_SH, path)
        except BaseException:
            os.close(fd)
            raise
        if locked:
            return fd
        os.close(fd)
        if locked is None:
            return None
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)

    def locked_by_others(self, fd: int, path: str) -> bool:
        """Whether another living process holds `lock_shared` on a folder, which this one keeps locked by `fd`."""
        try:
            return self._try_lock(fd, fcntl.LOCK_EX, path) is False
        finally:
            # A conversion that fails gives the shared lock up as well (flock(2)).
            self._try_lock(fd, fcntl.LOCK_SH, path)

    def is_locked(self, path: str) -> bool | None:
        """Whether a living process holds `lock_shared` on the folder; None: there are no locks here."""
        fd = self._open_folder(path)
        try:
            locked = self._try_lock(fd, fcntl.LOCK_EX, path)
        finally:
            os.close(fd)
        return None if locked is None else not locked

    def flock(self, fd: int, how: int) -> None:
        """The system call."""
        fcntl.flock(fd, how)

    def _try_lock(self, fd: int, how: int, path: str) -> bool | None:
        """Lock a folder without waiting. False: another process holds it; None: the file system has no locks."""
        try:
            self.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if self._warns:
                self._warns = False
                logger.warning(
                    "there are no file locks at %s (%s); instead, each process that saves there touches a small file "
                    "every few seconds, and what was not touched for a minute counts as left by a dead run",
                    os.path.dirname(path),
                    error.strerror,
                )
            return None
        return True

    def _open_folder(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
