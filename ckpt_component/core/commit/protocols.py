"""Which commit protocol a storage has, and which one a folder on disk was committed by."""

from __future__ import annotations

from ..storage.files import local_files
from ..storage.storage import Storage
from .manifest_commit import ManifestCommit, attempts_in
from .protocol import CommitProtocol
from .rename_commit import RenameCommit


def protocol_of(storage: Storage) -> CommitProtocol:
    """How attempts are committed in a storage."""
    files = local_files(storage)
    return RenameCommit(files) if files is not None and files.atomic_rename else ManifestCommit(storage)


def protocol_on_disk(storage: Storage, path: str) -> CommitProtocol:
    """How to change an existing folder: one that holds attempts is not moved as a whole."""
    return ManifestCommit(storage) if attempts_in(storage, path) else protocol_of(storage)
