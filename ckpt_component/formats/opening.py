"""Open the index of a checkpoint, whichever format it has: ours by its integrity files, or another program's."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

from ..core.commit.manifest import check_files, data_folder, read_manifest
from ..core.commit.names import SINGLE_FILES, no_step
from ..core.storage.locate import absolute
from ..core.storage.safe_open import read_failure
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointLoadError, CheckpointNotFoundError
from ..state.paths import rank_name
from .dcp_metadata import Megatron, StockDcp
from .folder import weights_in
from .index import Contents, Entry, Index, Listing, contents_of, joined
from .rank_index import RankIndex, StoredRange, read_rank_indexes
from .safetensors import SafetensorsFile, SafetensorsShards, safetensors_index
from .torch_archive import TorchFile, torch_file_entries, with_checksums


class OwnIndex(Index):
    """A checkpoint of ours.

    Args:
        found: what is at the path

    Attributes:
        per_rank: whether each rank has files of its own, which only this rank loads
    """

    manifest: Mapping[str, Any]
    world_size: int
    per_rank = False

    def __init__(self, found: Listing) -> None:
        self.manifest = found.manifest or {}
        super().__init__(found, data_folder(found.storage, found.path, self.manifest))
        self.world_size = self.manifest["world_size"]
        self.files = dict(map(itemgetter("name", "size"), self.manifest["files"]))
        check_files(self.storage, self.folder, self.manifest)

    @classmethod
    def recognises(cls, found: Listing) -> bool:
        """As the manifest says."""
        return found.manifest is not None and found.manifest.get("format") == cls.format

    @property
    def verified(self) -> bool:
        """Ours have checksums."""
        return True

    def columns(self, ranks: Sequence[int] | None = None) -> list[RankIndex]:
        """What ranks wrote; None: all ranks."""
        return read_rank_indexes(self.storage, self.folder, self.manifest, ranks)

    def of_rank(self, rank: int) -> Contents:
        """What a rank loads."""
        return self.contents


class OwnDcp(OwnIndex):
    """A checkpoint of the writer `dcp`: all ranks load from the files of all."""

    format = "dcp"

    @cached_property
    def contents(self) -> Contents:
        """Whole tensors, tensors in parts of several ranks, and objects."""
        return contents_of(self.where, self.columns())


class _OfRanks(OwnIndex):
    """A checkpoint with one file for each rank, which has the whole state of that rank."""

    per_rank = True

    @abstractmethod
    def _part(self, rank: int, columns: RankIndex) -> Contents:
        """What the file of a rank holds."""

    def of_rank(self, rank: int) -> Contents:
        """What the file of a rank holds."""
        return self._part(rank, *self.columns([rank]))

    @cached_property
    def contents(self) -> Contents:
        """The parts of all ranks, each below its name."""
        parts = [self._part(rank, columns) for rank, columns in enumerate(self.columns())]
        return parts[0] if len(parts) == 1 else joined({rank_name(rank): part for rank, part in enumerate(parts)})


class OwnSafetensors(_OfRanks):
    """A checkpoint of the writer `safetensors`."""

    format = "safetensors"

    def _part(self, rank: int, columns: RankIndex) -> Contents:
        return contents_of(self.where, [columns])


class OwnTorchSave(_OfRanks):
    """A checkpoint of the writer `torch_save`."""

    format = "torch_save"

    def file_of(self, rank: int) -> str:
        """The name of a rank's file.

        Raises:
            CheckpointCorruptError: there is none
        """
        name = f"checkpoint_{rank}.pt"
        if name not in self.files:
            raise CheckpointCorruptError(f"{self.folder} has no file of rank {rank}, {name}.")
        return name

    def _part(self, rank: int, columns: RankIndex) -> Contents:
        entries = torch_file_entries(self.storage, self.folder, self.file_of(rank))
        return Contents.of(with_checksums(entries.values(), columns.ranges()), columns.containers)


class OwnFiles(OwnIndex):
    """Files of another program that the writer `files` saved; that program loads them."""

    format = "files"

    def of_rank(self, rank: int) -> Contents:
        """Nothing.

        Raises:
            CheckpointLoadError: always; names the files that can be loaded one by one
        """
        names = [name for name in self.files if name.endswith(SINGLE_FILES)]
        raise CheckpointLoadError(
            f"{self.where} has the files of another program, which loads them itself; here, load one of them: "
            f"{', '.join(names) or 'none of them is a checkpoint'}."
        )

    @cached_property
    def contents(self) -> Contents:
        """The contents of each file below its name; a file that is not a checkpoint is one object."""
        ranges: dict[str, list[StoredRange]] = {}
        for columns in self.columns():
            for piece in columns.ranges():
                ranges.setdefault(piece.file, []).append(piece)
        parts = {name: self._part(name, pieces) for name, pieces in ranges.items() if name.endswith(SINGLE_FILES)}
        contents = joined(parts)
        for name, pieces in ranges.items():
            if name not in parts:
                size = sum(piece.length for piece in pieces)
                contents.objects[name] = Entry(name, (name,), "", (), size, tuple(pieces))
        return contents

    def _part(self, name: str, ranges: Sequence[StoredRange]) -> Contents:
        if not name.endswith(".safetensors"):
            return Contents.of(with_checksums(torch_file_entries(self.storage, self.folder, name).values(), ranges))
        columns = safetensors_index(self.storage, self.where, self.folder, [name])
        contents = contents_of(self.where, [columns])
        entries = [entry._replace(place=contents.ranges_at(entry.place)) for entry in contents.tensors.values()]
        return Contents.of(with_checksums(entries, ranges))


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
