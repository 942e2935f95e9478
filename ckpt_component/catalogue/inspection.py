"""What there is to verify of a checkpoint, good or damaged, ours or another program's."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointCorruptError, CheckpointError
from ..state.paths import keys_of
from ..storage.checksum import find_checksum
from ..storage.file_set import FileSet
from ..storage.fs import FsOps
from ..storage.manifest import check_files, data_folder, read_manifest
from ..storage.names import MANIFEST, integrity_name
from .archive import members_of, seek_to
from .entries import Catalogue
from .opening import open_catalogue
from .rank_index import RankIndex, read_rank_indexes
from .verification import Damage, Item, items_of, small_files

_ZIP = b"PK\x03\x04"


@dataclass
class Inspection:
    """A checkpoint before its data is read.

    Attributes:
        path: the checkpoint.
        folder: the folder of its files.
        items: items with a checksum that can be read.
        lost: items that a file is too short for, or is missing.
        damages: what is wrong already: files that are missing or of another size, small files, indexes.
        sizes: bytes of its files, by name.
        own: whether it is one of ours, with checksums of its own.
        verifiable: whether the items cover all data.
    """

    path: str
    folder: str
    items: list[Item] = field(default_factory=list)
    lost: list[Item] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    own: bool = True
    verifiable: bool = True
    _indexes: list[RankIndex] = field(default_factory=list)
    _catalogue: Catalogue | None = None

    def stored_keys(self) -> Iterator[tuple[str, str, int, int]]:
        """Every key with each range of bytes that is stored for it: key, file, start, end."""
        if any(index.paths or index.objects for index in self._indexes):
            for index in self._indexes:
                tensors = index.tensors
                for key, number in zip(keys_of(index.paths), index.numbers, strict=True):
                    start = tensors.offsets[number]
                    yield key, tensors.names[tensors.files[number]], start, start + tensors.lengths[number]
                for key, (_, item) in zip(keys_of([path for path, _ in index.objects]), index.objects, strict=True):
                    yield key, item.file, item.offset, item.offset + item.length
            return
        if self._catalogue is None:
            try:
                self._catalogue = open_catalogue(self.path)
            except CheckpointError:
                return  # it is too damaged to say which keys it has
        for key, entry in self._catalogue.entries.items():
            for piece in entry.pieces:
                yield key, piece.file, piece.offset, piece.offset + piece.length


def inspect(fs: FsOps, path: str) -> Inspection:
    """Find out what there is to verify. Damage is collected, not raised.

    Args:
        fs: the file system.
        path: the checkpoint, a folder or a file.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CheckpointLoadError: another release wrote it, or a checksum cannot be computed here.
        CheckpointUnreadableError: the folder cannot be read.
    """
    try:
        manifest = read_manifest(fs, path) if os.path.isdir(path) else None
        folder = path if manifest is None else data_folder(path, manifest)
    except CheckpointCorruptError as error:
        return Inspection(path, path, damages=[Damage(MANIFEST, None, error)])
    return _foreign(path) if manifest is None else _own(fs, path, folder, manifest)


def _own(fs: FsOps, path: str, folder: str, manifest: Mapping[str, Any]) -> Inspection:
    inspection = Inspection(path, folder, sizes={entry["name"]: entry["size"] for entry in manifest["files"]})
    there: dict[str, int] = {}
    for entry in manifest["files"]:
        try:
            check_files(fs, folder, {"files": [entry]})
        except CheckpointCorruptError as error:
            inspection.damages.append(Damage(entry["name"], None, error))
        there[entry["name"]] = fs.size(os.path.join(folder, entry["name"])) or 0
    bad = {damage.file for damage in inspection.damages}
    good = {**manifest, "files": [entry for entry in manifest["files"] if entry["name"] not in bad]}
    inspection.damages += small_files(fs, folder, good)
    bad = {damage.file for damage in inspection.damages}
    for rank in range(manifest["world_size"]):
        if integrity_name(rank) in bad:
            continue
        try:
            (index,) = read_rank_indexes(fs, folder, manifest, [rank])
        except CheckpointCorruptError as error:
            inspection.damages.append(Damage(integrity_name(rank), None, error))
            continue
        inspection._indexes.append(index)
        for item in items_of(folder, index):
            (inspection.items if item.end <= there[item.file] else inspection.lost).append(item)
    return inspection


def _foreign(path: str) -> Inspection:
    try:
        catalogue = open_catalogue(path)
    except CheckpointCorruptError as error:
        return Inspection(path, path, damages=[Damage(os.path.basename(path), None, error)])
    folder = catalogue.folder
    inspection = Inspection(path, folder, own=False, verifiable=False, _catalogue=catalogue)
    pieces = {piece[:3] for entry in catalogue.entries.values() for piece in entry.pieces}
    names = sorted({file for file, _, _ in pieces})
    inspection.sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in names}
    if catalogue.format.startswith("safetensors"):
        return inspection
    if catalogue.format == "torch_save (file)":
        pieces = {(name, 0, inspection.sizes[name]) for name in names}
    covered = True
    with FileSet(folder) as files:
        for file, offset, length in sorted(pieces):
            try:
                summed = _archived(files, file, offset, length, os.path.join(folder, file))
            except CheckpointCorruptError as error:
                inspection.damages.append(Damage(file, None, error))
                continue
            covered = covered and summed is not None
            inspection.items += summed or ()
    inspection.verifiable = covered and bool(inspection.items)
    return inspection


def _archived(files: FileSet, file: str, offset: int, length: int, where: str) -> list[Item] | None:
    """The members of a `torch.save` archive with their CRCs; None if it has none, as torch may omit them."""
    magic = memoryview(bytearray(len(_ZIP)))
    if length < len(_ZIP) or not files.fill(file, magic, offset) or bytes(magic) != _ZIP:
        return None
    crc32, items = find_checksum("crc32"), []
    with io.BufferedReader(_Window(files, file, offset, length), 4096) as stream:
        for member in members_of(stream, length, where).values():
            if not member.file_size:
                continue
            if not member.CRC:
                return None
            seek_to(stream, member, where)
            items.append(Item(file, offset + stream.tell(), member.file_size, member.CRC, crc32))
    return items


class _Window(io.RawIOBase):
    """A range of a file as a stream."""

    def __init__(self, files: FileSet, file: str, offset: int, length: int) -> None:
        self._files, self._file, self._offset, self._length = files, file, offset, length
        self._position = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position in the range."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + position < 0:
            raise ValueError("a negative position")
        self._position = base + position
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Read the next bytes of the range."""
        count = max(min(len(buffer), self._length - self._position), 0)
        if not count or not self._files.fill(self._file, memoryview(buffer)[:count], self._offset + self._position):
            return 0
        self._position += count
        return count
