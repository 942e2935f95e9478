"""Commit by renaming: for file systems, where a folder gets its name in one step.

An attempt collects its files in a hidden folder next to its target. The commit renames that folder to the target, or,
for a checkpoint of a single file, the file, over the one that was there. What is deleted or quarantined is renamed too.
"""

from __future__ import annotations

import logging
import os

from ...errors import CheckpointError, CheckpointExistsError, CheckpointSaveError
from ..storage.files import FileStorage
from ..storage.tree_removal import remove_if_empty
from .manifest import read_manifest
from .names import MANIFEST, STAGING_PREFIX, quarantine_path, staging_path, trash_path
from .protocol import Attempt, CommitProtocol, taken

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
