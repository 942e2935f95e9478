"""Liveness of save attempts: a process that works on one holds a lock on its folder, or keeps touching a mark file.

The mark file is for buckets and file systems without locks. It is touched every few seconds; an attempt without a touch
for a minute, by the clock of the file system, is considered dead. Its name has the process, so that where that process
would be seen, no minute passes after its end.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...errors import CheckpointConfigError, CheckpointInUseError
from ..outside import OUTSIDE, Latch, Outside, Thread
from ..processes.running import ProcessName
from ..storage.new_names import new_token
from ..storage.storage import LocalFolders, Storage
from .names import ALIVE_PREFIX, TRIAL_PREFIX
from .protocol import Attempt

logger = logging.getLogger("ckpt_component.storage")

TOUCH_SECONDS = 5.0
#: Without locks, an attempt that did not change for this long is considered dead.
QUIET_SECONDS = 60.0
#: The process of a folder younger than this may not have locked it yet.
_YOUNG_SECONDS = 5.0
#: Errors of `flock` on file systems without locks: NFS without lockd, Lustre without `-o flock`, some FUSE.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
#: How long to retry while other processes probe the lock; a probe holds it for microseconds.
_LOOK_SECONDS = 5.0
_LOOK_PAUSE = 0.01


class AttemptLock:
    """Marks an attempt as in use by this process, until `close` or the end of the process.

    Args:
        storage: the storage
        attempt: an attempt that has begun
        holder: names who locks it again after a failure, of which a mark may have stayed; empty: nobody does

    Raises:
        OSError: the folder could be neither locked nor marked
    """

    def __init__(self, storage: Storage, attempt: Attempt, holder: str = "") -> None:
        self._storage = storage
        self._attempt = attempt
        self._root = os.path.dirname(attempt.target)
        self._mark: str | None = None
        self._touching: tuple[Thread, Latch] | None = None
        self._lock: FolderLock | None = None
        if isinstance(storage, LocalFolders):
            lock, deadline = FolderLock(storage, attempt.staging), storage.outside.now() + _LOOK_SECONDS
            while (locked := lock.take(fcntl.LOCK_SH)) is False:  # another process probes it
                if storage.outside.now() > deadline:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), attempt.staging)
                storage.outside.sleep(_LOOK_PAUSE)
            self._lock = lock if locked else None
        if self._lock is None:
            holder = holder or new_token(storage.outside)
            name = f"{ALIVE_PREFIX}{attempt.token}.{ProcessName.current(storage.outside).key}.{holder}"
            self._mark = os.path.join(self._root, name)
            try:
                storage.close(storage.create(self._mark))
            except FileExistsError:  # this holder made it, and was told that it failed
                storage.touch(self._mark)
            over = storage.outside.latch()
            self._touching = storage.outside.start("ckpt-alive", self._touch, self._mark, over), over

    def held_by_others(self) -> bool:
        """Whether another live process holds a lock on the attempt, or on this host has marked it."""
        if self._lock is None:
            marks = _marks(self._root, self._storage.names(self._root), self._attempt.token)
            return any(_is_running(mark, self._storage.outside) for mark in marks if mark != self._mark)
        try:
            return self._lock.take(fcntl.LOCK_EX) is False
        finally:
            self._lock.take(fcntl.LOCK_SH)  # a failed conversion also drops the shared lock (flock(2))

    def touched_by_others(self) -> float:
        """When another process last touched its mark file for this attempt; 0 if there is none."""
        marks = _marks(self._root, self._storage.names(self._root), self._attempt.token)
        return max((_modified(self._storage, mark) for mark in marks if mark != self._mark), default=0.0)

    def close(self) -> None:
        """Release the attempt. Safe to call twice."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._touching is not None:
            thread, over = self._touching
            self._touching = None
            over.set()
            thread.join(1.0)  # it takes longer only when the storage hangs
        if self._mark is not None:
            mark, self._mark = self._mark, None
            try:
                self._storage.unlink(mark)
            except FileNotFoundError:
                pass  # a cleanup considered this process dead
            except OSError as error:
                logger.warning("%s could not be deleted and stays until a later start: %s", mark, error)

    def _touch(self, mark: str, over: Latch) -> None:
        warned = False
        while not over.wait(TOUCH_SECONDS):
            try:
                self._storage.touch(mark)
            except FileNotFoundError:
                return  # considered dead: the attempt is being deleted
            except OSError as error:
                if not warned:
                    logger.warning("%s could not be touched (%s); this run's save may be considered dead", mark, error)
                warned = True


class LifeSigns:
    """A snapshot of a folder of checkpoints, to find out which attempts in it are alive.

    Attributes:
        root: the folder
        names: the entries of the folder
    """

    def __init__(self, storage: Storage, root: str) -> None:
        self._storage = storage
        self.root = root
        self.names = storage.names(root)

    def is_alive(self, path: str, token: str, *, here: bool = True) -> bool:
        """Whether a process is working, or may be working, on the folder of an attempt.

        Args:
            path: path of the folder
            token: token of the attempt
            here: whether its processes run on this host, so that a missing lock means that they are dead
        """
        locked = is_locked(self._storage, path)
        if locked:
            return True
        marks = _marks(self.root, self.names, token)
        # A process that was about to mark itself has the time of `is_young` for it, as it has to lock the folder.
        if not here or (locked is None and not (marks and all(map(self._has_ended, marks)))):
            marks.append(path)
        return any(not self.is_quiet(mark) for mark in marks)

    def is_quiet(self, path: str) -> bool:
        """Whether the owner of a file, or a folder with its entries, must be dead: it ended, or was silent for long."""
        return self._has_ended(path) or self.is_silent(path)

    def _has_ended(self, path: str) -> bool:
        """Whether a path names a process that would be seen here and does not exist; False if unknown or unnamed."""
        return _is_running(path, self._storage.outside) is False

    def is_silent(self, path: str) -> bool:
        """Whether a file, or a folder with its entries, was last changed long ago."""
        return self._now - _modified(self._storage, path) >= QUIET_SECONDS

    def is_young(self, path: str) -> bool:
        """Whether a file, or a folder itself (not its entries), was made or changed just now."""
        return self._now - self._storage.changed(path) < _YOUNG_SECONDS

    @cached_property
    def _now(self) -> float:
        """The current time of the file system, which on a server may differ from this host's."""
        try:
            return self._storage.try_folder(self.root, f"{TRIAL_PREFIX}{new_token(self._storage.outside)}")
        except OSError as error:
            logger.info("could not read the clock of %s, using this host's: %s", self.root, error)
            return self._storage.outside.date()


@dataclass(eq=False)
class FolderLock:
    """A lock on a folder that this process holds from `take` to `release`, or to its end.

    Args:
        files: the storage
        folder: path of the folder, which exists
    """

    files: LocalFolders
    folder: str
    _fd: int | None = field(default=None, init=False)

    def take(self, how: int = fcntl.LOCK_EX) -> bool | None:
        """Lock it without waiting, or change how it is locked; `how`: exclusive, or shared with other processes.

        Returns:
            False: another process has it; None: the file system has no locks.
        """
        files, fd = self.files, self.files.open_folder(self.folder) if self._fd is None else self._fd
        try:
            files.flock(fd, how | fcntl.LOCK_NB)
            self._fd = fd
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if files.warns:
                files.warns = False
                logger.warning(
                    "there are no file locks at %s (%s); instead, each process that saves there touches a small file "
                    "every few seconds, and a save that was not touched for a minute is considered dead",
                    os.path.dirname(self.folder),
                    error.strerror,
                )
            return None
        finally:
            if self._fd is None:
                files.close_folder(fd)

    def claim(self, in_use: str, no_locks: str) -> None:
        """Take it for this process alone.

        Raises:
            CheckpointInUseError: another process has it; with this text
            CheckpointConfigError: the file system has no locks; with this text
        """
        locked = self.take()
        if locked is None:
            raise CheckpointConfigError(no_locks)
        if not locked:
            raise CheckpointInUseError(in_use)

    def release(self) -> None:
        """Release it. Safe to call twice, or if it was not taken."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self.files.close_folder(fd)


def is_locked(storage: Storage, path: str) -> bool | None:
    """Whether a live process holds an `AttemptLock` on a folder; None: the storage has no locks."""
    if not isinstance(storage, LocalFolders):
        return None
    lock = FolderLock(storage, path)
    try:
        locked = lock.take()
    except FileNotFoundError:
        if not storage.exists(path):
            raise
        return False  # it is on other hosts alone, and the leading rank holds its lock where it made the attempt
    lock.release()
    return None if locked is None else not locked


def marked_attempt(name: str) -> str | None:
    """The token of the attempt that a mark file belongs to; None: the name is of no mark file."""
    return name.removeprefix(ALIVE_PREFIX).partition(".")[0] if name.startswith(ALIVE_PREFIX) else None


def living_marks(storage: Storage, root: str) -> list[str]:
    """The marks under a root, in a storage without locks, of running processes of this host."""
    marks = [name for name in storage.names(root) if name.startswith(ALIVE_PREFIX)]
    return [name for name in marks if _is_running(name, storage.outside)]


def marking_process(mark: str, outside: Outside = OUTSIDE) -> ProcessName | None:
    """The process of this host that a mark names; None: it names none."""
    return ProcessName.of_key(mark.rpartition(".")[0].rpartition(".")[2], outside)


def _marks(root: str, names: Sequence[str], token: str) -> list[str]:
    """Paths of the mark files of processes that work on an attempt without a lock."""
    return [os.path.join(root, name) for name in names if marked_attempt(name) == token]


def _is_running(mark: str, outside: Outside) -> bool | None:
    """Whether the process that a path names is running; None: it is unknown, or the path names none."""
    process = marking_process(mark, outside)
    return None if process is None else process.running


def _modified(storage: Storage, path: str) -> float:
    """When a file or a folder was last modified; 0 if it no longer exists."""
    try:
        return storage.modified(path)
    except FileNotFoundError:
        return 0.0
