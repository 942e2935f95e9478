"""Which attempts are alive: a process that works on one holds a lock on its folder, or touches a file beside it.

The file is for file systems without locks. It is touched every few seconds, and an attempt for which nothing was
touched for a minute, by the clock of the file system, counts as dead.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Sequence
from functools import cached_property

from .fs import FsOps
from .names import ALIVE_PREFIX, TRIAL_PREFIX, Attempt, new_token

logger = logging.getLogger(__name__)

TOUCH_SECONDS = 5.0
#: Without a lock to look at, what did not change for so long is dead.
QUIET_SECONDS = 60.0
#: A folder this young may not have been locked by its process yet.
_YOUNG_SECONDS = 5.0
#: What a lock is answered where the file system has none: NFS without lockd, Lustre without `-o flock`, some FUSE.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
#: A process that looks at a lock holds it for microseconds.
_LOOK_SECONDS = 5.0
_LOOK_PAUSE = 0.01


class AttemptLock:
    """Shows that this process works on an attempt, until `close` or its death.

    Args:
        fs: where effects go.
        attempt: which has begun.

    Raises:
        OSError: the folder could be neither locked nor marked.
    """

    def __init__(self, fs: FsOps, attempt: Attempt) -> None:
        self._fs = fs
        self._attempt = attempt
        self._root, staging = os.path.dirname(attempt.target), attempt.staging
        self._over = threading.Event()
        self._mark: str | None = None
        self._thread: threading.Thread | None = None
        self._fd: int | None = fs.open_folder(staging)
        deadline, locked = time.monotonic() + _LOOK_SECONDS, None
        try:
            while (locked := try_lock(fs, self._fd, fcntl.LOCK_SH, staging)) is False:  # another process looks at it
                if time.monotonic() > deadline:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), staging)
                time.sleep(_LOOK_PAUSE)
        finally:
            if not locked:
                os.close(self._fd)
        if locked is None:
            self._fd = None
            self._mark = os.path.join(self._root, f"{ALIVE_PREFIX}{attempt.token}.{new_token()}")
            fs.close(fs.create(self._mark))
            self._thread = threading.Thread(target=self._touch, args=(self._mark,), name="ckpt-alive", daemon=True)
            self._thread.start()

    def held_by_others(self) -> bool:
        """Whether another living process holds a lock on the attempt."""
        if self._fd is None:
            return False
        try:
            return try_lock(self._fs, self._fd, fcntl.LOCK_EX, self._attempt.staging) is False
        finally:
            # A conversion that fails gives the shared lock up as well (flock(2)).
            try_lock(self._fs, self._fd, fcntl.LOCK_SH, self._attempt.staging)

    def touched_by_others(self) -> float:
        """When another process without a lock last showed that it lives; 0 where none did."""
        marks = _marks(self._root, self._fs.names(self._root), self._attempt.token)
        return max((_modified(self._fs, mark) for mark in marks if mark != self._mark), default=0.0)

    def close(self) -> None:
        """Give it back."""
        self._over.set()
        if self._fd is not None:
            os.close(self._fd)
        if self._thread is not None:
            self._thread.join(1.0)  # longer only where the storage does not answer
        if self._mark is not None:
            try:
                self._fs.unlink(self._mark)
            except FileNotFoundError:
                pass  # it was taken for that of a dead process
            except OSError as error:
                logger.warning("%s stays until a later start: %s", self._mark, error)

    def _touch(self, mark: str) -> None:
        warned = False
        while not self._over.wait(TOUCH_SECONDS):
            try:
                self._fs.touch(mark)
            except FileNotFoundError:
                return  # taken for dead: the attempt is being deleted
            except OSError as error:
                if not warned:
                    logger.warning(
                        "%s could not be touched (%s); the save may be taken for that of a dead run", mark, error
                    )
                warned = True


class LifeSigns:
    """One look at a folder of checkpoints, and at who is alive in it.

    Attributes:
        root: the folder.
        names: what is in it.
    """

    def __init__(self, fs: FsOps, root: str) -> None:
        self._fs = fs
        self.root = root
        self.names = fs.names(root)

    def is_alive(self, path: str, token: str, *, here: bool = True) -> bool:
        """Whether a process works on the folder of an attempt, or may do so.

        Args:
            path: of the folder.
            token: of the attempt.
            here: whether its processes are of this host, whose locks can be seen where there are any.
        """
        locked = is_locked(self._fs, path)
        if locked:
            return True
        marks = _marks(self.root, self.names, token)
        if locked is None or not here:
            marks.append(path)
        return any(not self.is_quiet(mark) for mark in marks)

    def is_quiet(self, path: str) -> bool:
        """Whether a file, or all that is in a folder, has not changed for so long that its owner is dead."""
        return self._now - _modified(self._fs, path) >= QUIET_SECONDS

    def is_young(self, path: str) -> bool:
        """Whether a file or a folder itself (not what is in it) was made or changed just now."""
        return self._now - os.lstat(path).st_mtime < _YOUNG_SECONDS

    @cached_property
    def _now(self) -> float:
        """The time of day on the file system, which on a server may differ from this host's."""
        try:
            return self._fs.try_folder(self.root, f"{TRIAL_PREFIX}{new_token()}")
        except OSError as error:
            logger.info("the clock of %s is taken to be that of this host: %s", self.root, error)
            return time.time()


def try_lock(fs: FsOps, fd: int, how: int, path: str) -> bool | None:
    """Lock an open folder without waiting. False: another process holds it; None: the file system has no locks."""
    try:
        fs.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        if fs.warns:
            fs.warns = False
            logger.warning(
                "there are no file locks at %s (%s); instead, each process that saves there touches a small file "
                "every few seconds, and what was not touched for a minute counts as left by a dead run",
                os.path.dirname(path),
                error.strerror,
            )
        return None
    return True


def is_locked(fs: FsOps, path: str) -> bool | None:
    """Whether a living process holds an `AttemptLock` on a folder; None: there are no locks here."""
    fd = fs.open_folder(path)
    try:
        locked = try_lock(fs, fd, fcntl.LOCK_EX, path)
    finally:
        os.close(fd)
    return None if locked is None else not locked


def _marks(root: str, names: Sequence[str], token: str) -> list[str]:
    """The files by which processes without a lock show that they work on an attempt."""
    return [os.path.join(root, name) for name in names if name.startswith(f"{ALIVE_PREFIX}{token}.")]


def _modified(fs: FsOps, path: str) -> float:
    """When something changed there; 0 for what is not there any more."""
    try:
        return fs.modified(path)
    except FileNotFoundError:
        return 0.0
