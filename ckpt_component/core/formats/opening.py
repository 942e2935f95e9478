"""Open a checkpoint of any format: the only place that knows which formats there are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointLoadError, CheckpointNotFoundError
from ..commit.manifest import read_manifest
from ..commit.names import no_step
from ..storage.locate import absolute
from ..storage.safe_open import read_failure
from ..storage.storage import Storage
from .dcp_metadata import Megatron, StockDcp
from .folder import weights_in
from .index import Index, Listing
from .own import OwnDcp, OwnFiles, OwnSafetensors, OwnTorchSave
from .safetensors import SafetensorsFile, SafetensorsShards
from .torch_file import TorchFile

#: All formats, in the order in which they are asked.
FORMATS: tuple[type[Index], ...] = (
    OwnDcp,
    OwnTorchSave,
    OwnSafetensors,
    OwnFiles,
    Megatron,
    StockDcp,
    SafetensorsShards,
    SafetensorsFile,
    TorchFile,
)


def open_index(storage: Storage, path: str | os.PathLike[str], manifest: Mapping[str, Any] | None = None) -> Index:
    """Find out which format a checkpoint has. Reads no data, and checks that the files are there.

    Args:
        storage: the storage of the path
        path: the checkpoint, a folder or a file; it may be a link
        manifest: its manifest, if that was read already

    Raises:
        CheckpointNotFoundError: there is no checkpoint at this path
        CheckpointCorruptError: a file that the manifest lists is missing or has another size
        CheckpointUnreadableError: the folder or the manifest cannot be read
        CheckpointLoadError: the format is not supported
    """
    found = _look(storage, absolute(path), manifest)
    for kind in FORMATS:
        if kind.recognises(found):
            return kind(found)
    if found.manifest is not None:
        form = found.manifest.get("format")
        raise CheckpointLoadError(f"{found.path} has the format {form!r:.200}, which this release cannot read.")
    names = ", ".join(found.names[:5]) or "it is empty"
    raise CheckpointNotFoundError(
        f"{found.path} holds no checkpoint ({names}); name the folder of one, with manifest.json, .metadata or a file "
        "of weights, or the file."
    )


def _look(storage: Storage, path: str, manifest: Mapping[str, Any] | None) -> Listing:
    """What there is at a path."""
    try:
        is_folder = storage.is_folder(path)
        exists = is_folder or storage.exists(path)
    except OSError as error:
        raise read_failure(path, error) from error
    if not exists:
        raise CheckpointNotFoundError(f"There is no checkpoint at {path}{no_step(path)}.")
    if not is_folder:
        return Listing(storage, path, weights=path)
    manifest = read_manifest(storage, path) if manifest is None else manifest
    if manifest is not None:
        return Listing(storage, path, manifest)
    try:
        names = storage.names(path)
    except OSError as error:
        raise read_failure(path, error) from error
    name = weights_in(names)
    return Listing(storage, path, None, names, os.path.join(path, name) if name else "")
