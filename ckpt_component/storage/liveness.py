"""Which attempts are alive: a process that works on one holds a lock on its folder, or touches a file beside it.

The file is for file systems without locks. It is touched every few seconds, and an attempt for which nothing was
touched for a minute, by the clock of the file system, counts as dead.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from functools import cached_property

from .fs import FsOps
from .names import TRIAL_PREFIX, alive_path, alive_prefix, new_token

logger = logging.getLogger(__name__)

TOUCH_SECONDS = 5.0
#: Without a lock to look at, what did not change for so long is dead.
QUIET_SECONDS = 60.0
#: A process that looks at a lock holds it for microseconds.
_LOOK_SECONDS = 5.0
_LOOK_PAUSE = 0.01


class AttemptLock:
    """Shows that this process works on an attempt, until `close` or its death.

    Args:
        fs: where effects go.
        root: the folder of the checkpoints.
        token: of the attempt.
        staging: the attempt's folder.

    Raises:
        OSError: the folder could be neither locked nor marked.
    """

    def __init__(self, fs: FsOps, root: str, token: str, staging: str) -> None:
        self._fs = fs
        self._root = root
        self._token = token
        self._staging = staging
        self._over = threading.Event()
        self._mark: str | None = None
        self._thread: threading.Thread | None = None
        self._fd: int | None = None
        deadline = time.monotonic() + _LOOK_SECONDS
        while True:
            try:
                self._fd = fs.lock_shared(staging)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_LOOK_PAUSE)
        if self._fd is None:
            self._mark = alive_path(root, token)
            fs.close(fs.create(self._mark))
            self._thread = threading.Thread(target=self._touch, args=(self._mark,), name="ckpt-alive", daemon=True)
            self._thread.start()

    def held_by_others(self) -> bool:
        """Whether another living process holds a lock on the attempt."""
        return self._fd is not None and self._fs.locked_by_others(self._fd, self._staging)

    def touched_by_others(self) -> float:
        """When another process without a lock last showed that it lives; 0 where none did."""
        names = [name for name in self._fs.names(self._root) if name.startswith(alive_prefix(self._token))]
        paths = [os.path.join(self._root, name) for name in names]
        return max((_modified(self._fs, path) for path in paths if path != self._mark), default=0.0)

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
        locked = self._fs.is_locked(path)
        if locked:
            return True
        marks = [os.path.join(self.root, name) for name in self.names if name.startswith(alive_prefix(token))]
        if locked is None or not here:
            marks.append(path)
        return any(not self.is_quiet(mark) for mark in marks)

    def is_quiet(self, path: str) -> bool:
        """Whether a file, or all that is in a folder, has not changed for so long that its owner is dead."""
        return self._now - _modified(self._fs, path) >= QUIET_SECONDS

    def is_older(self, path: str, seconds: float) -> bool:
        """Whether a file or a folder itself (not what is in it) was made or changed longer ago."""
        return self._now - os.lstat(path).st_mtime >= seconds

    @cached_property
    def _now(self) -> float:
        return self._fs.now(self.root, f"{TRIAL_PREFIX}{new_token()}")


def _modified(fs: FsOps, path: str) -> float:
    """When something changed there; 0 for what is not there any more."""
    try:
        return fs.modified(path)
    except FileNotFoundError:
        return 0.0
