"""How attempts and checkpoints lie on disk, with and without atomic renames of folders.

With renames, an attempt collects its files in a hidden folder beside its target and a rename commits it. Without them
(mounted object stores), each attempt has a folder of its own inside the target, named by its token, and creating
`manifest.json` beside these folders, which only one attempt can do, commits it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointSaveError,
    CheckpointUnreadableError,
)
from .fs import FsOps
from .liveness import LifeSigns
from .manifest import MAX_BYTES, data_folder, encode_manifest, read_manifest
from .names import MANIFEST, QUARANTINED, is_token, quarantine_path, staging_path, trash_path

logger = logging.getLogger(__name__)

#: How often a folder is made again that another attempt removed in between because it was empty.
_TRIES = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class Layout:
    """For file systems that rename a folder in one step; `PutLayout` is for the others.

    Args:
        fs: where effects go.
    """

    def __init__(self, fs: FsOps) -> None:
        self._fs = fs

    @staticmethod
    def staging(target: str, token: str) -> str:
        """The folder in which an attempt collects its files."""
        return staging_path(target, token)

    @staticmethod
    def is_free(names: Sequence[str]) -> bool:
        """Whether a target folder that holds these names may be saved to."""
        return not names

    def begin(self, staging: str) -> None:
        """Make the staging folder, durably."""
        parent = os.path.dirname(staging)
        for tries_left in reversed(range(_TRIES)):
            self._fs.make_folders(parent)
            try:
                self._fs.make_folder(staging)
                break
            except FileNotFoundError:
                if not tries_left:
                    raise
        self._fs.sync_folder(parent)

    def commit(self, target: str, content: dict[str, Any], check: Callable[[], None], timeout: float) -> None:
        """Make an attempt the checkpoint `target`, durably.

        Args:
            target: path of the checkpoint.
            content: of the manifest; its `attempt` is the token.
            check: called as late as possible; what it raises stops the commit.
            timeout: seconds for which a manifest whose creation was not confirmed is read back.
        """
        fs, staging = self._fs, self.staging(target, content["attempt"])
        fs.write_new(os.path.join(staging, MANIFEST), encode_manifest(content))
        fs.sync_folder(staging)
        check()
        if is_folder(target):
            remove_if_empty(fs, target)  # if it is not empty, the rename refuses it with the right error
        try:
            fs.rename_new(staging, target)
        except FileExistsError as error:
            raise _taken(target) from error
        try:
            fs.sync_folder(os.path.dirname(target))
        except OSError:
            # The save is reported as failed, so it must not be found either: take the name away again.
            discard(fs, target)
            raise

    def is_over(self, target: str, token: str) -> bool:
        """Whether an attempt was committed or abandoned. Raises CheckpointError when that cannot be seen."""
        return not os.path.isdir(self.staging(target, token))

    def abandon(self, target: str, token: str) -> None:
        """Remove what a failed attempt left."""
        if not self.is_over(target, token):
            discard(self._fs, self.staging(target, token))

    def discard(self, path: str) -> None:
        """Delete a checkpoint or a staging folder: first it is renamed out of sight, then its manifest goes."""
        trash = trash_path(path)
        self._fs.rename_new(path, trash)
        self._fs.sync_folder(os.path.dirname(path))
        if self._fs.size(os.path.join(trash, MANIFEST)) is not None:
            self._fs.unlink(os.path.join(trash, MANIFEST))
        self._fs.remove_tree(trash)

    def quarantine(self, path: str) -> str:
        """Put a damaged checkpoint aside, durably; returns where its data is now."""
        target = quarantine_path(path)
        self._fs.rename_new(path, target)
        self._fs.sync_folder(os.path.dirname(path))
        return target


class PutLayout(Layout):
    """For file systems without renames; a step's folder may hold several attempts, and none touches another's."""

    @staticmethod
    def staging(target: str, token: str) -> str:
        """A folder in the target, where the files stay."""
        return os.path.join(target, token)

    @staticmethod
    def is_free(names: Sequence[str]) -> bool:
        """Other attempts, and what is quarantined, are not in the way."""
        return not names or (MANIFEST not in names and (QUARANTINED in names or all(map(is_token, names))))

    def begin(self, staging: str) -> None:
        """Also sync the folder above: another attempt may have made the target and not synced it yet."""
        super().begin(staging)
        self._fs.sync_folder(os.path.dirname(os.path.dirname(staging)))

    def commit(self, target: str, content: dict[str, Any], check: Callable[[], None], timeout: float) -> None:
        """Put the manifest, which names the folder of the files."""
        fs, token = self._fs, content["attempt"]
        staging, data = self.staging(target, token), encode_manifest({**content, "at": token})
        draft = os.path.join(staging, f"{MANIFEST}.draft")
        fs.write_new(draft, data)
        fs.sync_folder(staging)
        check()
        try:
            fs.put_new(os.path.join(target, MANIFEST), data, draft)
        except OSError as error:
            self._confirm(target, token, data, error, timeout)
        try:
            fs.sync_folder(target)
        except OSError:
            # The save is reported as failed, so it must not be found either.
            self._take_back(target)
            raise
        try:
            fs.unlink(draft)
        except OSError as error:
            logger.warning("%s is committed, and %s in it could not be deleted (%s)", target, draft, error)

    def is_over(self, target: str, token: str) -> bool:
        """Its folder is missing, or the manifest names it."""
        return not os.path.isdir(self.staging(target, token)) or self._holder(target) == token

    def abandon(self, target: str, token: str) -> None:
        """Delete the attempt's folder, and the target's where nothing else is in it."""
        staging = self.staging(target, token)
        try:
            if os.path.isdir(staging):
                if self.is_over(target, token):
                    return  # it failed after its commit
                discard(self._fs, staging)
            if is_folder(target):
                remove_if_empty(self._fs, target)
        except (CheckpointError, OSError) as error:
            logger.warning("%s stays until the next start: %s", staging, error)

    def discard(self, path: str) -> None:
        """Delete the manifest, which makes the checkpoint, and then its data."""
        manifest, data = read_manifest(self._fs, path), path
        if manifest is not None:
            data = data_folder(path, manifest)
            self._fs.unlink(os.path.join(path, MANIFEST))
            self._fs.sync_folder(path)
        self._fs.remove_tree(data)
        if data != path:
            remove_if_empty(self._fs, path)  # quarantined data or a late attempt may be beside it

    def quarantine(self, path: str) -> str:
        """The data stays and is marked, so that a sweep leaves it alone; then the manifest is deleted."""
        manifest = os.path.join(path, MANIFEST)
        try:
            content = self._fs.read(manifest, MAX_BYTES)
        except FileNotFoundError:
            content = b"{}\n"
        folders = self._data_folders(path)
        for folder in folders:
            self._fs.write_over(os.path.join(folder, QUARANTINED), content)
        if os.path.lexists(manifest):
            self._fs.unlink(manifest)
            self._fs.sync_folder(path)
        return folders[0]

    def _data_folders(self, path: str) -> list[str]:
        """Where the data is; every place where it may be if the manifest cannot tell."""
        with contextlib.suppress(CheckpointError):  # it is quarantined because it is damaged
            manifest = read_manifest(self._fs, path)
            if manifest is not None:
                return [data_folder(path, manifest)]
        signs = LifeSigns(self._fs, os.path.dirname(path))
        attempts = {token: os.path.join(path, token) for token in attempts_in(self._fs, path)}
        dead = [
            folder
            for token, folder in attempts.items()
            if not signs.is_alive(folder, token) and not is_quarantined(self._fs, folder)
        ]
        return dead or [path]

    def _holder(self, target: str) -> str | None:
        """The token of the committed attempt, or None; CheckpointError when that cannot be read."""
        manifest = read_manifest(self._fs, target)
        return None if manifest is None else str(manifest.get("attempt"))

    def _confirm(self, target: str, token: str, data: bytes, error: OSError, timeout: float) -> None:
        """The put failed, or its answer was lost: return when the manifest is there all the same, else raise."""
        deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
        while True:
            try:
                holder = self._holder(target)
                break
            except CheckpointCorruptError as unread:
                unreadable = isinstance(unread, CheckpointUnreadableError)
                if not unreadable and self._holds_part(target, data):
                    self._take_back(target)  # a store that shows files before they are whole: this is no commit
                    raise error from unread
                if not unreadable or time.monotonic() + pause > deadline:
                    raise CheckpointSaveError(
                        f"Could not find out whether {target} was committed: {error}, and then {unread} The next "
                        "start decides by what is on disk.",
                        error.errno,
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if holder is None:
            raise error
        if holder != token:
            raise _taken(target) from error
        logger.warning("%s is committed, although its last step was answered by an error: %s", target, error)

    def _holds_part(self, target: str, data: bytes) -> bool:
        try:
            content = self._fs.read(os.path.join(target, MANIFEST), MAX_BYTES)
        except OSError:
            return False  # then it is unknown, which is what the caller reports
        return len(content) < len(data) and data.startswith(content)

    def _take_back(self, target: str) -> None:
        try:
            self._fs.unlink(os.path.join(target, MANIFEST))
            self._fs.sync_folder(target)
        except OSError as error:
            logger.warning(
                "%s could not be taken back (%s), so it may be found although its save failed", target, error
            )


def layout_of(fs: FsOps, path: str) -> Layout:
    """How an existing checkpoint or attempt lies, whichever run made it."""
    return Layout(fs) if fs.atomic_rename and not attempts_in(fs, path) else PutLayout(fs)


def discard(fs: FsOps, path: str) -> bool:
    """Delete a checkpoint or a staging folder, manifest first. Returns False, and warns, when that failed."""
    try:
        layout_of(fs, path).discard(path)
    except (CheckpointError, OSError) as error:
        logger.warning("%s could not be deleted (%s); it is not a checkpoint and may be deleted by hand", path, error)
        return False
    return True


def quarantine(fs: FsOps, path: str) -> str:
    """Put a damaged checkpoint aside, durably; returns where its data is now.

    Nothing in this package lists, counts, loads or deletes it from then on. The step's own name is free, so that the
    run can save that step again.

    Raises:
        OSError: it could not be done; the checkpoint stays where it is.
    """
    return layout_of(fs, path).quarantine(path)


def attempts_in(fs: FsOps, folder: str) -> list[str]:
    """The tokens of the attempts that have their files inside a checkpoint's folder, committed or not."""
    if not is_folder(folder):
        return []
    return [name for name in fs.names(folder) if is_token(name) and is_folder(os.path.join(folder, name))]


def is_quarantined(fs: FsOps, folder: str) -> bool:
    """Whether the data in a folder is only kept to be looked at."""
    return fs.size(os.path.join(folder, QUARANTINED)) is not None


def is_folder(path: str) -> bool:
    """Whether there is a folder, and not a link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


def remove_if_empty(fs: FsOps, folder: str) -> None:
    """Delete a folder unless something is in it."""
    try:
        fs.remove_folder(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def _taken(target: str) -> CheckpointExistsError:
    return CheckpointExistsError(f"{target} was taken by another save in the meantime; this save was given up.")
