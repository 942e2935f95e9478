"""Find out which format a checkpoint has, and list what it holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointLoadError, CheckpointNotFoundError
from ..storage.file_system import file_system
from ..storage.fs import FsOps
from ..storage.manifest import check_files, data_folder, read_manifest
from ..storage.names import step_in_name
from .entries import Catalogue
from .own import entries_of
from .rank_index import read_rank_indexes


def open_catalogue(path: str | os.PathLike[str], fs: FsOps | None = None) -> Catalogue:
    """List what a checkpoint of any supported format holds. Reads its indexes, no data, and checks that they fit.

    Args:
        path: The checkpoint, a folder or a file; it may be a link.
        fs: The file system; None: the plain one.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at this path.
        CheckpointCorruptError: An index is damaged, or contradicts the files or another index.
        CheckpointUnreadableError: An index cannot be read.
        CheckpointLoadError: The format is not supported.
    """
    path, fs = os.path.abspath(os.path.expanduser(os.fspath(path))), fs or file_system(durable=True)
    if not os.path.lexists(path):
        raise CheckpointNotFoundError(f"There is no checkpoint at {path}.")
    manifest = read_manifest(fs, path) if os.path.isdir(path) else None
    if manifest is not None:
        return _own(fs, path, manifest)
    raise CheckpointNotFoundError(f"{path} holds no checkpoint.")


def _own(fs: FsOps, path: str, manifest: Mapping[str, Any]) -> Catalogue:
    folder, form = data_folder(path, manifest), manifest.get("format")
    check_files(fs, folder, manifest)
    if form not in ("dcp", "safetensors"):
        raise CheckpointLoadError(f"{path} has the format {form!r:.200}, which this release cannot read.")
    ranks = read_rank_indexes(fs, folder, manifest)
    return Catalogue(
        path,
        folder,
        form,
        manifest["world_size"],
        step_in_name(os.path.basename(path)),
        sum(entry["size"] for entry in manifest["files"]),
        entries_of(path, ranks),
        list(dict.fromkeys(container for rank in ranks for container in rank.containers)),
        manifest,
    )
