"""Which commit protocol a storage has, and which one a folder on disk was committed by."""

from __future__ import annotations

from ..storage.files import local_files
from ..storage.storage import Storage
from .manifest_commit import ManifestCommit, attempts_in
from .protocol import CommitProtocol
from .rename_commit import RenameCommit


def protocol_of(fs: Storage) -> CommitProtocol:
    """How attempts are committed in a storage."""
    files = local_files(fs)
    return RenameCommit(files) if files is not None and files.atomic_rename else ManifestCommit(fs)


def protocol_on_disk(fs: Storage, path: str) -> CommitProtocol:
    """How to change an existing folder: one that holds attempts is not moved as a whole."""
    return ManifestCommit(fs) if attempts_in(fs, path) else protocol_of(fs)
