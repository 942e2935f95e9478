"""The two commit protocols, by rename and by manifest, and which one a storage has."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...errors import (
    CheckpointConfigError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointPartError,
    CheckpointSaveError,
    CheckpointTimeoutError,
    CheckpointUnreadableError,
)
from ..storage.files import FileStorage, local_files
from ..storage.new_names import new_token
from ..storage.storage import Storage
from ..storage.tree_removal import remove_if_empty
from .liveness import LifeSigns
from .manifest import MAX_BYTES, data_folder, read_manifest
from .names import (
    MANIFEST,
    QUARANTINED,
    STAGING_PREFIX,
    TRIAL_PREFIX,
    is_token,
    quarantine_path,
    staging_path,
    trash_path,
)
from .protocol import Attempt, CommitProtocol, taken, wait_visible

logger = logging.getLogger("ckpt_component.storage")


class RenameCommit(CommitProtocol):
    """See the top of this file.

    Args:
        storage: files whose folders can be renamed in one step
    """

    draft = MANIFEST
    creates_targets = False
    storage: FileStorage

    def __init__(self, storage: FileStorage) -> None:
        super().__init__(storage)

    def staging(self, target: str, token: str) -> str:
        return staging_path(target, token)

    def refuse_taken(self, target: str, file: str = "") -> None:
        if not file:
            super().refuse_taken(target)
        elif self.storage.is_real_folder(target):
            raise CheckpointExistsError(f"{target} is a folder, and a file is to be saved there; save to another path.")

    def commit(self, attempt: Attempt, manifest: bytes, timeout: float) -> None:
        target = attempt.target
        if self.storage.is_real_folder(target):
            remove_if_empty(self.storage, target)  # if it is not empty, the rename fails with the right error
        try:
            self.storage.rename_new(attempt.staging, target)
        except OSError as error:
            # The answer of a server may be lost, and the question repeated, although it was done.
            if not self._is_renamed(attempt, error):
                if isinstance(error, FileExistsError):
                    raise taken(target) from error
                raise
            logger.warning("%s is committed, although its last step reported an error: %s", target, error)
        try:
            self.storage.sync_folder(os.path.dirname(target))
        except OSError:
            # The save is reported as failed, so readers must not find it: remove it again.
            self.discard(target)
            raise

    def _is_renamed(self, attempt: Attempt, error: OSError) -> bool:
        """Whether an attempt has the name of its target, although the rename reported an error.

        Raises:
            CheckpointSaveError: that cannot be found out
        """
        try:
            if self.storage.is_folder(attempt.staging):
                return False
            manifest = read_manifest(self.storage, attempt.target)
        except (CheckpointError, OSError) as look_error:
            raise CheckpointSaveError(
                f"Could not find out whether {attempt.target} was committed: {error}, and then {look_error} The next "
                "start decides by what is on disk.",
                error.errno,
            ) from error
        return manifest is not None and manifest.get("attempt") == attempt.token

    def commit_file(self, attempt: Attempt) -> None:
        self.storage.replace(os.path.join(attempt.staging, attempt.file), attempt.target)
        self.storage.sync_folder(os.path.dirname(attempt.target))
        try:
            self.storage.remove_tree(attempt.staging)
        except OSError as error:
            logger.warning("%s is saved, and %s could not be deleted (%s)", attempt.target, attempt.staging, error)

    def is_committed(self, attempt: Attempt) -> bool:
        # A folder is gone once it is committed.
        return bool(attempt.file) and self.storage.size(os.path.join(attempt.staging, attempt.file)) is None

    def abandon(self, attempt: Attempt) -> None:
        if self.storage.is_folder(attempt.staging):
            self.discard(attempt.staging)

    def _delete(self, path: str) -> None:
        # Rename it first, so that a reader never sees a partly deleted checkpoint.
        self.storage.remove_tree(self._moved(path, trash_path(path, self.storage.outside)))

    def quarantine(self, path: str) -> str:
        return self._moved(path, quarantine_path(path, self.storage.outside))

    def _moved(self, path: str, target: str) -> str:
        self.storage.rename_new(path, target)
        self.storage.sync_folder(os.path.dirname(path))
        return target

    def remove_unfinished(self, path: str) -> None:
        if os.path.basename(path).startswith(STAGING_PREFIX):
            # Rename first, so that a process that wakes up late finds either all of it or nothing.
            path, staging = trash_path(path, self.storage.outside), path
            self.storage.rename_new(staging, path)
        super().remove_unfinished(path)


class ManifestCommit(CommitProtocol):
    """See the top of this file.

    Args:
        storage: the storage
    """

    draft = f"{MANIFEST}.draft"
    creates_targets = True

    def staging(self, target: str, token: str) -> str:
        return os.path.join(target, token)

    def refuse_taken(self, target: str, file: str = "") -> None:
        if file:
            raise CheckpointConfigError(
                f"{target} is to be a single file, which needs a rename, and its storage has none; save to a local "
                "folder, or with a writer of folders."
            )
        super().refuse_taken(target)

    def _leaves_room(self, names: Sequence[str]) -> bool:
        # Other attempts and quarantined data do not conflict.
        return MANIFEST not in names and (QUARANTINED in names or all(map(is_token, names)))

    def begin(self, attempt: Attempt) -> None:
        trial = f"{TRIAL_PREFIX}{new_token(self.storage.outside)}"
        self.storage.check_puts(os.path.dirname(attempt.target), trial)
        super().begin(attempt)

    def files_of(self, attempt: Attempt) -> str:
        """The folder of the attempt, which stays."""
        return attempt.staging

    def manifest_fields(
        self, attempt: Attempt, ranks: Sequence[Mapping[str, Any]], sidecars: Collection[str]
    ) -> Mapping[str, Any]:
        return {"at": attempt.token}

    def commit(self, attempt: Attempt, manifest: bytes, timeout: float) -> None:
        storage, target = self.storage, attempt.target
        draft = os.path.join(attempt.staging, self.draft)
        try:
            storage.put_new(os.path.join(target, MANIFEST), manifest, draft)
        except OSError as error:
            self._confirm(attempt, manifest, error, timeout)
        try:
            storage.sync_folder(target)
        except OSError:
            # The save is reported as failed, so readers must not find it.
            self._take_back(target)
            raise
        try:
            storage.unlink(draft)
        except OSError as error:
            logger.warning("%s is committed, and %s in it could not be deleted (%s)", target, draft, error)

    def _confirm(self, attempt: Attempt, manifest: bytes, error: OSError, timeout: float) -> None:
        """After a failed or unanswered put: return if the manifest was created anyway, else raise."""
        target = attempt.target
        seconds = timeout if self.storage.shows_late else 0.0  # in memory, who does not answer has ended
        with contextlib.suppress(CheckpointTimeoutError):  # the read below raises
            wait_visible(lambda: self._is_readable(target), target, seconds, self.storage)
        try:
            token = self._committed_token(target)
        except CheckpointCorruptError as read_error:
            if not isinstance(read_error, CheckpointUnreadableError) and self._holds_part(target, manifest):
                self._take_back(target)  # the store shows files before they are complete: this is not a commit
                raise error from read_error
            raise CheckpointSaveError(
                f"Could not find out whether {target} was committed: {error}, and then {read_error} The next start "
                "decides by what is on disk.",
                error.errno,
            ) from error
        if token is None:
            raise error
        if token != attempt.token:
            raise taken(target) from error
        logger.warning("%s is committed, although its last step reported an error: %s", target, error)

    def _is_readable(self, target: str) -> bool:
        """Whether the manifest can be read, or is known to be missing."""
        try:
            read_manifest(self.storage, target)
        except CheckpointUnreadableError:
            return False
        except CheckpointError:
            pass  # it was read, and is invalid
        return True

    def _committed_token(self, target: str) -> str | None:
        """The token of the committed attempt, or None. Raises CheckpointError when the manifest cannot be read."""
        manifest = read_manifest(self.storage, target)
        return None if manifest is None else str(manifest.get("attempt"))

    def _holds_part(self, target: str, manifest: bytes) -> bool:
        try:
            content = self.storage.read(os.path.join(target, MANIFEST), MAX_BYTES)
        except OSError:
            return False  # the caller reports that the outcome is unknown
        return len(content) < len(manifest) and manifest.startswith(content)

    def _take_back(self, target: str) -> None:
        try:
            self.storage.unlink(os.path.join(target, MANIFEST))
            self.storage.sync_folder(target)
        except OSError as error:
            text = "%s could not be rolled back (%s), so it may be found although its save failed"
            logger.warning(text, target, error)

    def is_committed(self, attempt: Attempt) -> bool:
        return self._committed_token(attempt.target) == attempt.token

    def abandon(self, attempt: Attempt) -> None:
        storage = self.storage
        try:
            if storage.is_folder(attempt.staging):
                if self.is_committed(attempt):
                    return  # the failure came after the commit
                storage.remove_tree(attempt.staging)
            if storage.is_real_folder(attempt.target):
                remove_if_empty(storage, attempt.target)
        except (CheckpointError, OSError) as error:
            logger.warning("%s could not be removed and stays until the next start: %s", attempt.staging, error)

    def remove_unfinished(self, path: str) -> None:
        # A power cut must not undo the deletion of a manifest, whose sync may have failed, when the rest is gone.
        self.storage.sync_folder(os.path.dirname(path))
        super().remove_unfinished(path)

    def _delete(self, path: str) -> None:
        manifest, data = read_manifest(self.storage, path), path
        if manifest is not None:
            with contextlib.suppress(CheckpointPartError):  # nothing else is here
                data = data_folder(self.storage, path, manifest)
            self.storage.unlink(os.path.join(path, MANIFEST))
        self.storage.sync_folder(path)  # also if an earlier try had deleted the manifest, and this failed
        self.storage.remove_tree(data)
        if data != path:
            remove_if_empty(self.storage, path)  # it may also hold quarantined data or a late attempt

    def quarantine(self, path: str) -> str:
        # Mark the data, so that a sweep skips it, then delete the manifest.
        manifest = os.path.join(path, MANIFEST)
        try:
            content = self.storage.read(manifest, MAX_BYTES)
        except FileNotFoundError:
            content = b"{}\n"
        folders = self._data_folders(path)
        for folder in folders:
            self.storage.write_over(os.path.join(folder, QUARANTINED), content)
        if self.storage.exists(manifest):
            self.storage.unlink(manifest)
            self.storage.sync_folder(path)
        return folders[0]

    def _data_folders(self, path: str) -> list[str]:
        """The data folder of a damaged checkpoint; all candidates if the manifest does not name one."""
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(self.storage, path)
            if manifest is not None:
                return [data_folder(self.storage, path, manifest)]
        signs, folders = LifeSigns(self.storage, os.path.dirname(path)), []
        for token in attempts_in(self.storage, path):
            folder = os.path.join(path, token)
            if not signs.is_alive(folder, token) and not is_quarantined(self.storage, folder):
                folders.append(folder)
        return folders or [path]


def attempts_in(storage: Storage, folder: str) -> list[str]:
    """The tokens of the attempts whose files are inside a checkpoint's folder, committed or not."""
    if not storage.is_real_folder(folder):
        return []
    return [
        name for name in storage.names(folder) if is_token(name) and storage.is_real_folder(os.path.join(folder, name))
    ]


def is_quarantined(storage: Storage, folder: str) -> bool:
    """Whether the data in a folder is quarantined, that is, kept for inspection only."""
    return storage.size(os.path.join(folder, QUARANTINED)) is not None


def protocol_of(storage: Storage) -> CommitProtocol:
    """How attempts are committed in a storage."""
    files = _renaming(storage)
    if files is not None:
        return RenameCommit(files)
    own: CommitProtocol | None = storage.protocol()
    return ManifestCommit(storage) if own is None else own


def attempt_here(storage: Storage, plain: Mapping[str, str]) -> Attempt:
    """An attempt that another process has begun, from `Attempt.to_plain`."""
    inside = os.path.dirname(plain["staging"]) == plain["target"]
    return Attempt(ManifestCommit(storage) if inside else protocol_of(storage), **plain)


def creates_targets(storage: Storage) -> bool:
    """See `CommitProtocol.creates_targets`, of the protocol of a storage."""
    return ManifestCommit.creates_targets if _renaming(storage) is None else RenameCommit.creates_targets


def _renaming(storage: Storage) -> FileStorage | None:
    """The storage, if it is a file system that renames folders atomically."""
    files = local_files(storage)
    return files if files is not None and files.atomic_rename else None


def protocol_on_disk(storage: Storage, path: str) -> CommitProtocol:
    """How to change an existing folder: one that holds attempts is not moved as a whole."""
    return ManifestCommit(storage) if attempts_in(storage, path) else protocol_of(storage)
