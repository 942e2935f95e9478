"""Find out which format a checkpoint has, and list what it holds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import CheckpointLoadError, CheckpointNotFoundError
from ..commit.manifest import check_files, data_folder, read_manifest
from ..commit.names import SINGLE_FILES, step_in_name
from ..memory.gc_control import collector_paused
from ..state.paths import key_of
from ..state.per_rank import rank_name
from ..storage.locate import absolute, storage_at
from ..storage.safe_open import place_of, read_failure
from ..storage.storage import Storage
from .dcp_metadata import read_metadata
from .entries import Catalogue, Entry
from .folder import INDEX, MEGATRON_COMMON_FILE, MEGATRON_MARKER, METADATA, weights_in
from .own import entries_of, items_of
from .rank_index import RankIndex, read_rank_indexes
from .safetensors import safetensors_index, shards_of
from .torch_file import torch_file_entries, with_checksums

_DCP_FILE = re.compile(r"__(\d+)_\d+\.distcp")


@collector_paused()  # there may be a hundred thousand entries
def open_catalogue(path: str | os.PathLike[str], fs: Storage | None = None) -> Catalogue:
    """List what a checkpoint of any supported format holds. Reads its indexes, no data, and checks that they fit.

    Args:
        path: The checkpoint, a folder or a file; it may be a link.
        fs: The storage; None: that of the path, without options.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at this path.
        CheckpointCorruptError: An index is damaged, or contradicts the files or another index.
        CheckpointUnreadableError: An index cannot be read.
        CheckpointLoadError: The format is not supported.
    """
    path, fs = absolute(path), fs or storage_at(path)
    if not fs.is_folder(path):
        if not fs.exists(path):
            raise CheckpointNotFoundError(f"There is no checkpoint at {path}.")
        return _foreign_file(fs, path)
    manifest = read_manifest(fs, path)
    if manifest is not None:
        return _own(fs, path, manifest)
    try:
        names = fs.names(path)
    except OSError as error:
        raise read_failure(path, error) from error
    if METADATA in names:
        return _stock_dcp(fs, path, names)
    name = weights_in(names)
    if name is None:
        raise CheckpointNotFoundError(
            f"{path} holds no checkpoint ({', '.join(names[:5]) or 'it is empty'}); name the folder of one, with "
            "manifest.json, .metadata or a file of weights, or the file."
        )
    if not name.endswith(INDEX):
        return _foreign_file(fs, os.path.join(path, name), path)
    shards = shards_of(fs, path, name)
    index = safetensors_index(fs, path, *shards)
    return _foreign(fs, path, shards.folder, "safetensors (index)", entries_of(path, [index]))


def _own(fs: Storage, path: str, manifest: Mapping[str, Any]) -> Catalogue:
    folder, form, world_size = data_folder(fs, path, manifest), manifest.get("format"), manifest["world_size"]
    check_files(fs, folder, manifest)
    forms: Mapping[Any, Callable[[Storage, str, str, RankIndex, int], dict[str, Entry]]]
    forms = {"torch_save": _own_torch_file, "safetensors": _own_safetensors, "files": _own_files}
    if form != "dcp" and form not in forms:
        raise CheckpointLoadError(f"{path} has the format {form!r:.200}, which this release cannot read.")
    ranks = read_rank_indexes(fs, folder, manifest)
    if form == "dcp":
        entries = entries_of(path, ranks)
    else:
        entries = {}
        for number, rank in enumerate(ranks):
            of_rank = forms[form](fs, path, folder, rank, number)
            entries |= of_rank if world_size == 1 or form == "files" else _below(rank_name(number), of_rank)
    return Catalogue(
        path=path,
        storage=fs,
        folder=folder,
        format=str(form),
        world_size=world_size,
        step=step_in_name(os.path.basename(path)),
        nbytes=sum(entry["size"] for entry in manifest["files"]),
        verified=True,
        entries=entries,
        containers=list(dict.fromkeys(container for rank in ranks for container in rank.containers)),
        manifest=manifest,
    )


def _own_safetensors(fs: Storage, path: str, folder: str, rank: RankIndex, number: int) -> dict[str, Entry]:
    return entries_of(path, [rank])


def _own_torch_file(fs: Storage, path: str, folder: str, rank: RankIndex, number: int) -> dict[str, Entry]:
    return with_checksums(torch_file_entries(fs, folder, f"checkpoint_{number}.pt"), items_of(rank))


def _own_files(fs: Storage, path: str, folder: str, rank: RankIndex, number: int) -> dict[str, Entry]:
    """The entries of files of another program, each below the name of its file."""
    entries: dict[str, Entry] = {}
    items = items_of(rank)
    for name in dict.fromkeys([*rank.tensors.names, *(item.file for item in rank.extras)]):
        of_file = [item for item in items if item.file == name]
        if not name.endswith(SINGLE_FILES):
            entries[name] = Entry(name, (name,), "object", "", (), sum(item.length for item in of_file), tuple(of_file))
        elif name.endswith(".safetensors"):
            index = safetensors_index(fs, path, folder, [name])
            entries |= _below(name, with_checksums(entries_of(path, [index]), of_file))
        else:
            entries |= _below(name, with_checksums(torch_file_entries(fs, folder, name), of_file))
    return entries


def _below(name: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries with a name in front of their paths."""
    paths = [(name, *entry.path) for entry in entries.values()]
    return {
        key: entry._replace(key=key, path=path)
        for key, path, entry in zip(map(key_of, paths), paths, entries.values(), strict=True)
    }


def _stock_dcp(fs: Storage, path: str, names: list[str]) -> Catalogue:
    """A checkpoint of stock DCP or Megatron. Every stored chunk is an archive, which says where its payload is."""
    entries, containers = read_metadata(fs, path)
    megatron = MEGATRON_MARKER in names
    if megatron and MEGATRON_COMMON_FILE in names:
        entries |= torch_file_entries(fs, path, MEGATRON_COMMON_FILE)
    ranks = {match[1] for match in map(_DCP_FILE.fullmatch, names) if match is not None}
    form = "megatron" if megatron else "dcp (torch)"
    return _foreign(fs, path, path, form, entries, containers=containers, world_size=len(ranks) or None)


def _foreign_file(fs: Storage, path: str, shown: str | None = None) -> Catalogue:
    """A file of safetensors or `torch.save`; `shown`: the path of the checkpoint."""
    folder, name = place_of(*os.path.split(path))
    if path.endswith(".safetensors"):
        index = safetensors_index(fs, path, folder, [name])
        return _foreign(fs, shown or path, folder, "safetensors (file)", entries_of(path, [index]))
    return _foreign(fs, shown or path, folder, "torch_save (file)", torch_file_entries(fs, folder, name))


def _foreign(fs: Storage, path: str, folder: str, form: str, entries: Mapping[str, Entry], **more: Any) -> Catalogue:
    pieces = [piece for entry in entries.values() for piece in entry.pieces]
    sizes = {name: fs.size(os.path.join(folder, name)) or 0 for name in {piece.file for piece in pieces}}
    names = [os.path.basename(path)] if fs.is_folder(path) else [*reversed(path.split(os.sep)[-2:])]
    return Catalogue(
        path=path,
        storage=fs,
        folder=folder,
        format=form,
        world_size=more.pop("world_size", None),
        step=next((step for step in map(step_in_name, names) if step is not None), None),
        nbytes=sum(sizes.values()),
        verified=bool(pieces) and all(piece.checksum is not None for piece in pieces),
        entries=entries,
        **more,
    )
