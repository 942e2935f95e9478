"""`WorkFolder`: the hidden folder beside a folder of weights in which its next version is made, and both their lock."""

from __future__ import annotations

import fcntl
import logging
import os

from ..core.commit.liveness import try_lock
from ..core.storage.files import FileStorage
from ..errors import CheckpointConfigError, CheckpointInUseError

logger = logging.getLogger(__name__)

_PREFIX = ".ckpt-pull."


class WorkFolder:
    """The hidden folder beside another one; it stays, empty, so that there is one to lock.

    Args:
        fs: the file system
        folder: absolute path of the folder beside it

    Attributes:
        path: its path
        next: path of the folder in it in which a version is made
    """

    def __init__(self, fs: FileStorage, folder: str) -> None:
        parent, name = os.path.split(folder)
        self.path = os.path.join(parent, _PREFIX + name)
        self.next = os.path.join(self.path, "next")
        self._fs = fs
        self._folder = folder
        self._lock: int | None = None

    def take(self) -> None:
        """Lock both folders for this process, and delete what a dead one left.

        Raises:
            CheckpointInUseError: another process has them
            CheckpointConfigError: the folder cannot be exchanged, or there are no locks
            OSError: from the file system
        """
        fs, folder = self._fs, self._folder
        if fs.is_folder(folder):
            is_mounted = fs.device(folder) != fs.device(os.path.dirname(folder))
            if is_mounted or not fs.is_real_folder(folder):
                kind = "a mount point" if is_mounted else "a link"
                raise CheckpointConfigError(
                    f"{folder} is {kind}, which cannot be exchanged; name a folder inside of it."
                )
        fs.make_folders(self.path)
        lock = fs.open_folder(self.path)
        try:
            self._lock_by(lock)
        except BaseException:
            fs.close_folder(lock)
            raise
        self._lock = lock
        try:
            between = f"{self.next}.between"
            if fs.exists(between) and not fs.exists(folder):  # cut off where an exchange takes three steps
                fs.rename_new(between, folder)
            for name in fs.names(self.path):
                fs.remove_tree(os.path.join(self.path, name))
        except BaseException:
            self.release()
            raise

    def _lock_by(self, lock: int) -> None:
        locked = try_lock(self._fs, lock, fcntl.LOCK_EX, self.path)
        if locked is None:
            raise CheckpointConfigError(
                f"The file system of {self._folder} has no locks, so two processes could change it; name a folder on a "
                "disk of this host."
            )
        if not locked:
            raise CheckpointInUseError(
                f"Another process on this host brings {self._folder} to versions; end it, or name another folder."
            )

    def make_next(self) -> None:
        """Make `next` anew, empty."""
        if self._fs.exists(self.next):
            self._fs.remove_tree(self.next)
        self._fs.make_folder(self.next)

    def drop_next(self) -> None:
        """Delete `next`, which nobody needs any more; if that fails, with a warning, the next version does it."""
        try:
            if self._fs.exists(self.next):
                self._fs.remove_tree(self.next)
        except OSError as error:
            logger.warning("%s could not be deleted, and stays until the next version: %s", self.next, error)

    def release(self) -> None:
        """Release both folders."""
        if self._lock is not None:
            self._fs.close_folder(self._lock)
            self._lock = None
