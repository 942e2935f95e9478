"""`LocalCopy`: a folder of weights on this host that is brought from version to version, and is whole at any time.

The next version is made in a hidden folder beside it, verified, made durable, and exchanged with the folder in one
step. What was exchanged out is the *spare*: if nobody has its files open, the version after that is made in it, so that
only the tensors that differ are written.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from ..core.commit.liveness import FolderLock
from ..core.progress import Progress, no_progress
from ..core.storage.files import FileStorage
from ..core.storage.space import FULL, amount
from ..core.storage.storage import Storage
from ..errors import (
    CheckpointConfigError,
    CheckpointCorruptError,
    CheckpointSaveError,
    CheckpointStorageFullError,
)
from .fetched import TensorFiles, apply_deltas, copy_whole
from .versions import Version

logger = logging.getLogger(__name__)

#: Name of the state in the folder.
STATE = ".ckpt-version.json"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class CopyState:
    """The state of a folder.

    Attributes:
        source: path or URL of the versions that it comes from
        version: number of the version
        attempt: token of the commit of that version: another one with this number is another version
        step: training step of the version; None: unknown
        options: digest of what selected and cast the weights
    """

    source: str
    version: int
    attempt: str
    step: int | None = None
    options: str = ""

    def encode(self) -> bytes:
        """The content of the file."""
        return (json.dumps(asdict(self), sort_keys=True) + "\n").encode()


def read_state(storage: Storage, folder: str) -> CopyState | None:
    """The state of a folder; None: it has none, or, with a warning, a damaged one.

    Raises:
        OSError: it cannot be read
    """
    path = os.path.join(folder, STATE)
    try:
        data = storage.read(path, _MAX_BYTES)
    except FileNotFoundError:
        return None
    try:
        state = CopyState(**json.loads(data))
        if type(state.version) is not int or not isinstance(state.source, str):
            raise ValueError("its values have other types")
    except (ValueError, TypeError, RecursionError) as error:
        logger.warning("%s is damaged (%s); the folder gets a whole version", path, error)
        return None
    return state


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
        self._lock = FolderLock(fs, self.path)

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
        self._lock.claim(
            f"Another process on this host brings {folder} to versions; end it, or name another folder.",
            f"The file system of {folder} has no locks, so two processes could change it; name a folder on a disk of "
            "this host.",
        )
        try:
            between = f"{self.next}.between"
            if fs.exists(between) and not fs.exists(folder):  # cut off where an exchange takes three steps
                fs.rename_new(between, folder)
            for name in fs.names(self.path):
                fs.remove_tree(os.path.join(self.path, name))
        except BaseException:
            self.release()
            raise

    def make_next(self) -> None:
        """Make `next` again, empty."""
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
        self._lock.release()


Self = TypeVar("Self", bound="LocalCopy")

#: What of a folder is copied at a time, so that an end is noticed soon.
_COPY_BYTES = 64 << 20


@dataclass(frozen=True)
class Pulled:
    """A version that a folder was brought to.

    Attributes:
        version: number of the version
        step: its training step; None: unknown
        path: the folder
        changed: names of the tensors that differ from what the folder had; None: all may
        nbytes: bytes that were read from the source
        seconds: how long it took
        lag: seconds from the commit of the checkpoint until the folder had it; None: unknown
    """

    version: int
    step: int | None
    path: str
    changed: frozenset[str] | None
    nbytes: int
    seconds: float
    lag: float | None


class LocalCopy:
    """A folder of weights, and the lock on it. A context manager: the folder belongs to this process inside.

    Args:
        fs: the file system
        path: absolute path of the folder; what is there is replaced

    Attributes:
        path: the path
        state: what the folder has; None: no version

    Raises:
        CheckpointInUseError: another process brings the folder to versions
        CheckpointConfigError: there are no locks
        OSError: the folder beside it cannot be made
    """

    def __init__(self, fs: FileStorage, path: str) -> None:
        self.path = path
        self._fs = fs
        self._work = WorkFolder(fs, path)
        self._next = self._work.next
        #: The names in which the spare, which is at `_next`, differs from the folder; None: there is no spare.
        self._behind: set[str] | None = None
        self.state = read_state(fs, path) if fs.is_folder(path) else None

    @property
    def version(self) -> int | None:
        """Number of the version that the folder has."""
        return None if self.state is None else self.state.version

    def present(self) -> Pulled | None:
        """The version that the folder has, as if nothing had to be read for it; None: it has none."""
        state = self.state
        return None if state is None else Pulled(state.version, state.step, self.path, None, 0, 0.0, None)

    def bring_to(
        self, storage: Storage, source: str, chain: Sequence[Version], progress: Progress = no_progress
    ) -> Pulled:
        """Bring the folder to the last version of a chain. Until it is there, the folder stays as it is.

        Args:
            storage: the storage of the versions
            source: path of the folder that they are in
            chain: from `chain_to`: what is to be read, of which the first is whole, or based on what the folder has
            progress: follows the bytes

        Raises:
            CheckpointCorruptError: a version is damaged, or was deleted in the meantime; or the folder was changed
            CheckpointUnreadableError: a version cannot be read
            CheckpointStorageFullError: there is not enough space beside the folder
            CheckpointSaveError: the folder cannot be written
        """
        outside, newest = self._fs.outside, chain[-1]
        started = outside.now()
        token, options = str(newest.manifest["attempt"]), str(newest.manifest["weights"].get("options", ""))
        try:
            changed = self._make(storage, chain, progress)
            state = CopyState(source, newest.number, token, newest.step, options)
            self._fs.write_over(os.path.join(self._next, STATE), state.encode())
            self._sync_next()
            self._switch(state, changed)
        except OSError as error:
            raise self._failure(newest, error) from error
        finally:
            if self._behind is None:
                self._work.drop_next()
        return Pulled(
            newest.number,
            newest.step,
            self.path,
            None if changed is None else frozenset(changed),
            sum(version.nbytes for version in chain),
            outside.now() - started,
            outside.date() - newest.committed,
        )

    def _make(self, storage: Storage, chain: Sequence[Version], progress: Progress) -> set[str] | None:
        """Make a version at `_next`, so that there is no spare; returns the tensors that change, None: all may."""
        first, fs, behind = chain[0], self._fs, self._behind
        self._behind = None
        if first.is_whole:
            self._work.make_next()
            copy_whole(storage, first, fs, self._next, progress)
            if len(chain) > 1:
                with TensorFiles(fs, self._next, changes=True) as target:
                    apply_deltas(storage, chain[1:], target, target, progress=progress)
            return None
        if first.base != self.version:
            raise CheckpointCorruptError(f"{first.path} changes version {first.base}, and {self.path} has another one.")
        if behind is None or self._spare_is_open():
            behind = set()
            self._work.make_next()
            self._copy_folder()
        with TensorFiles(fs, self.path) as base, TensorFiles(fs, self._next, changes=True) as target:
            return apply_deltas(storage, chain, base, target, behind, progress)

    def _spare_is_open(self) -> bool:
        """Whether someone reads a file of the spare, which must not change under a reader."""
        for name in self._fs.names(self._next):
            if self._fs.is_open_elsewhere(os.path.join(self._next, name)):
                logger.info("%s of the version before is still open, so %s is copied", name, self.path)
                return True
        return False

    def _copy_folder(self) -> None:
        """Copy the files of the folder to `_next`; where the file system can, they share their blocks."""
        fs = self._fs
        for name in fs.names(self.path):
            path = os.path.join(self.path, name)
            size = fs.size(path)
            if name == STATE or size is None:
                continue
            source = int(fs.hold(path) or 0)
            try:
                fd = fs.create(os.path.join(self._next, name))
                try:
                    for offset in range(0, size, _COPY_BYTES):
                        fs.copy(fd, source, offset, min(_COPY_BYTES, size - offset))
                finally:
                    fs.close(fd)
            finally:
                fs.release(source)

    def _sync_next(self) -> None:
        for name in self._fs.names(self._next):
            with self._fs.durable_at_end(self._fs.open_again(os.path.join(self._next, name))):
                pass
        self._fs.sync_folder(self._next)

    def _switch(self, state: CopyState, changed: set[str] | None) -> None:
        """Give `_next` the name of the folder, and the folder that of `_next`, in one step."""
        if self._fs.exists(self.path):
            self._fs.exchange(self._next, self.path)
            self._behind = changed
        else:
            self._fs.rename_new(self._next, self.path)
        self.state = state
        self._fs.sync_folder(os.path.dirname(self.path))

    def _failure(self, version: Version, error: OSError) -> CheckpointSaveError:
        if error.errno in FULL:
            free = self._fs.free_bytes(self._work.path)
            there = "" if free is None else f", where {amount(free)} are free"
            return CheckpointStorageFullError(
                f"{version.path} does not fit beside {self.path}{there}. A version is made beside the one that is in "
                "use: delete what is not needed there, or name a folder on a larger disk.",
                error.errno,
            )
        return CheckpointSaveError(
            f"{self.path} could not be brought to version {version.number}: {error}", error.errno
        )

    def __enter__(self: Self) -> Self:
        try:
            self._work.take()
            self.state = read_state(self._fs, self.path)
        except OSError as error:
            self._work.release()
            raise CheckpointSaveError(f"{self.path} cannot be brought to a version: {error}", error.errno) from error
        return self

    def __exit__(self, *_: object) -> None:
        """Delete the spare, and release the folder."""
        self._behind = None
        self._work.drop_next()
        self._work.release()
