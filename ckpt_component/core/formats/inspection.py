"""What there is to verify of a checkpoint, good or damaged, ours or another program's."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import CheckpointCorruptError, CheckpointError, CheckpointPartError
from ...state.paths import key_of
from ..commit.manifest import check_files, data_folder, hosts_missing, read_manifest
from ..commit.names import MANIFEST, integrity_name
from ..commit.scan import is_torn
from ..storage.storage import Storage
from .opening import open_index
from .rank_index import RankIndex, StoredRange, checksum_of, read_rank_indexes
from .verification import Damage, small_files


@dataclass
class Inspection:
    """A checkpoint before its data is read.

    Attributes:
        storage: its storage
        path: the checkpoint
        folder: the folder of its files
        items: items with a checksum that can be read
        lost: items that a file is too short for, or is missing
        damages: what is wrong already: files that are missing or of another size, small files, indexes
        sizes: bytes of its files, by name
        verifiable: whether all data has checksums
        indexes: what each rank wrote, if the checkpoint is ours and the index is intact
        elsewhere: the hosts whose files are not here, and are not damaged by that
    """

    storage: Storage
    path: str
    folder: str
    items: list[StoredRange] = field(default_factory=list)
    lost: list[StoredRange] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    verifiable: bool = True
    indexes: list[RankIndex] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def keys_by_place(self) -> dict[tuple[str, int], list[str]]:
        """The keys whose bytes are in the item at an offset of a file."""
        keys = defaultdict(list)
        for index in self.indexes:  # a damaged checkpoint may have nothing else that says which keys it has
            for path, piece in [*zip(index.paths, map(index.range_of, index.numbers), strict=True), *index.objects]:
                keys[piece.file, piece.offset].append(key_of(path))
        if keys:
            return keys
        try:
            opened = open_index(self.storage, self.path)
            for entry in opened.entries.values():
                for piece in opened.contents.ranges_at(entry.place):
                    keys[piece.file, piece.offset].append(entry.key)
        except CheckpointError:  # it is too damaged
            keys.clear()
        return keys


def inspect(fs: Storage, path: str) -> Inspection:
    """Find out what there is to verify. Damage is collected, not raised.

    Args:
        fs: the file system
        path: the checkpoint, a folder or a file

    Raises:
        CheckpointNotFoundError: there is no checkpoint
        CheckpointLoadError: another release wrote it, or a checksum cannot be computed here
        CheckpointUnreadableError: the folder cannot be read
    """
    try:
        manifest = read_manifest(fs, path) if fs.is_folder(path) else None
        folder = path if manifest is None else data_folder(fs, path, manifest)
    except CheckpointPartError:
        raise
    except CheckpointCorruptError as error:
        return Inspection(fs, path, path, damages=[Damage(MANIFEST, None, error)])
    if manifest is not None:
        return _own(fs, path, folder, manifest)
    if fs.is_folder(path) and is_torn(fs.names(path)):
        lost = CheckpointCorruptError(f"{path} has no manifest: it was not committed, or has lost it.")
        return Inspection(fs, path, path, damages=[Damage(MANIFEST, None, lost)])
    return _foreign(fs, path)


def _own(fs: Storage, path: str, folder: str, manifest: Mapping[str, Any]) -> Inspection:
    sizes = {entry["name"]: entry["size"] for entry in manifest["files"]}
    elsewhere = hosts_missing(manifest, {name for name in sizes if not fs.exists(os.path.join(folder, name))})
    for name in (name for files in elsewhere.values() for name in files):
        del sizes[name]
    inspection = Inspection(fs, path, folder, sizes=sizes, elsewhere=sorted(elsewhere))
    whole, there = [], {}
    for entry in (entry for entry in manifest["files"] if entry["name"] in sizes):
        there[entry["name"]] = fs.size(os.path.join(folder, entry["name"])) or 0
        try:
            check_files(fs, folder, {"files": [entry]})
            whole.append(entry)
        except CheckpointCorruptError as error:
            inspection.damages.append(Damage(entry["name"], None, error))
    inspection.damages += small_files(fs, folder, {"files": whole})
    bad = {damage.file for damage in inspection.damages}
    for rank in range(manifest["world_size"]):
        if integrity_name(rank) in bad or integrity_name(rank) not in sizes:
            continue
        try:
            (index,) = read_rank_indexes(fs, folder, manifest, [rank])
        except CheckpointCorruptError as error:
            inspection.damages.append(Damage(integrity_name(rank), None, error))
            continue
        inspection.indexes.append(index)
        checksum_of(folder, index.checksum)  # it can be computed here
        for item in index.ranges():
            (inspection.items if item.end <= there[item.file] else inspection.lost).append(item)
    return inspection


def _foreign(fs: Storage, path: str) -> Inspection:
    """Opening it checks sizes and structure. Of other programs' formats, only `torch.save` may have checksums."""
    try:
        index = open_index(fs, path)
        ranges = {piece._replace(payload=None, offsets=(), shape=(), view=()) for piece in index.ranges()}
    except CheckpointCorruptError as error:
        return Inspection(fs, path, path, damages=[Damage(os.path.basename(path), None, error)])
    items = [piece for piece in ranges if piece.checksum is not None]
    return Inspection(fs, path, index.folder, items, sizes={**index.files}, verifiable=index.verified)
