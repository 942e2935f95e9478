"""Which commit protocol a storage has, and which one a folder on disk was committed by."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..storage.files import FileStorage, local_files
from ..storage.storage import Storage
from .manifest_commit import ManifestCommit, attempts_in
from .protocol import Attempt, CommitProtocol
from .rename_commit import RenameCommit


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
