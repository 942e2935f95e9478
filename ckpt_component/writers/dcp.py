"""Files of torch.distributed.checkpoint: what stock `dcp.load` reads, on any world size.

A stored tensor is a complete `torch.save` archive; `.metadata` is the only index (TORCH 6.1). Objects are archives of
their own in one small file, each in a slot with some room, so that `.metadata` stays as it is while they fit.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..config.errors import CheckpointConfigError
from ..config.schema import ChecksumName, IoMode
from ..image import objects as object_codec
from ..image.items import ItemTemplates
from ..image.layout import ITEM_ALIGNMENT, PAGE, ImageFile, Item, Layout, Structure, align
from ..image.tree import Path, key_of
from .base import FormatPlan, Sealed, Writer, balanced, describe, make_table
from .byte_io import Extra, WriteTable
from .lanes import Lane

_END_OF_ARCHIVE = b"PK\x05\x06"
_END_RECORD_BYTES = 22
#: The comment of a zip archive, which is where a slot's room goes, has at most 65,535 bytes.
_MOST_ROOM = 60_000


class DcpWriter(Writer):
    """The DCP format.

    Args:
        workers: how many parallel writers, and so files with tensors, a rank has.
        block_bytes: how many bytes one write call takes.
        checksum: algorithm of the items' checksums; `auto` becomes the fastest one that is installed.
        io: see `Writer`.
        max_bytes_per_second: see `Writer`.
        separation_hint: keys that start with this text go to files of their own, whose names start with it too, as
            NVRx's `FileSystemWriterAsync` does; needs at least two workers, which are shared by bytes.

    Raises:
        CheckpointConfigError: a value that makes no sense, or a checksum whose package is not installed.
    """

    format = "dcp"
    shared = True

    def __init__(
        self,
        workers: int = 2,
        block_bytes: int = 8 << 20,
        checksum: ChecksumName = ChecksumName.crc32,
        io: IoMode = IoMode.auto,
        max_bytes_per_second: float | None = None,
        separation_hint: str | None = None,
    ) -> None:
        super().__init__(workers, block_bytes, checksum, io, max_bytes_per_second)
        if separation_hint is not None:
            if workers < 2:
                raise CheckpointConfigError(
                    "checkpoint.writer.separation_hint needs at least two writers; set checkpoint.writer.workers=2."
                )
            if not re.fullmatch(r"[\w.\-]+", separation_hint) or separation_hint.startswith("."):
                raise CheckpointConfigError(
                    f"checkpoint.writer.separation_hint={separation_hint!r} becomes part of file names; use letters, "
                    "digits, '_', '-' and '.', not at the start."
                )
        self.separation_hint = separation_hint
        self._templates = ItemTemplates()

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        """Lay out one rank's files: `__<rank>_<n>.distcp`."""
        return _DcpPlan(structure, rank, self._groups(structure), self._templates, self.checksum)

    def index(self, catalogs: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        """`.metadata`, the only index that stock DCP reads."""
        return {".metadata": _metadata(catalogs)}

    def _groups(self, structure: Structure) -> list[tuple[str, list[int]]]:
        """(prefix of the file name, numbers of stored tensors) for every file."""
        hint = self.separation_hint
        keys = [key_of(structure.tensor_paths[stored.tensor]) for stored in structure.stored]
        everything = range(len(keys))
        if hint is None:
            return self._split("", list(everything), self.workers, structure)
        separate = [number for number in everything if keys[number].startswith(hint)]
        rest = [number for number in everything if not keys[number].startswith(hint)]
        if not separate or not rest:
            return self._split(hint if separate else "", separate or rest, self.workers, structure)
        total = sum(stored.nbytes for stored in structure.stored) or 1
        share = sum(structure.stored[number].nbytes for number in separate) / total
        workers = min(max(round(self.workers * share), 1), self.workers - 1)
        return [
            *self._split("", rest, self.workers - workers, structure),
            *self._split(hint, separate, workers, structure),
        ]

    @staticmethod
    def _split(group: str, numbers: list[int], bins: int, structure: Structure) -> list[tuple[str, list[int]]]:
        sizes = [structure.stored[number].nbytes for number in numbers]
        return [(group, [numbers[position] for position in part]) for part in balanced(sizes, bins)]


class _DcpPlan(FormatPlan):
    def __init__(
        self,
        structure: Structure,
        rank: int,
        groups: list[tuple[str, list[int]]],
        templates: ItemTemplates,
        checksum: str,
    ) -> None:
        self._rank = rank
        self._checksum = checksum
        files: list[ImageFile] = []
        items: list[Item] = []
        self._lanes: list[list[Lane]] = []
        base = 0
        for number, (group, stored_numbers) in enumerate(groups):
            position, first = 0, len(items)
            for stored_number in stored_numbers:
                stored = structure.stored[stored_number]
                prefix, suffix = templates.around(stored.dtype, stored.shape)
                offset = align(position, ITEM_ALIGNMENT)
                payload = offset + len(prefix)
                items.append(Item(stored_number, number, offset, payload, prefix, suffix, stored.nbytes))
                position = offset + items[-1].length
            files.append(ImageFile(f"{group}__{rank}_{number}.distcp", base, position))
            places = [(item.offset, item.length) for item in items[first:]]
            self._lanes.append([Lane(number, 0, position, first, places)])
            base = align(base + position, PAGE)
        self._object_file = f"__{rank}_{len(groups)}.distcp"
        self.layout = Layout(structure, tuple(structure.stored), tuple(files), tuple(items), base)
        self._slots: list[tuple[int, int]] = []
        self._constant: tuple[WriteTable, int, dict[str, Any]] | None = None

    def seal(self, objects: Sequence[Any]) -> Sealed:
        """Encode the objects; table and catalog are made again only when one outgrew its slot."""
        paths = self.layout.structure.object_paths
        archives = [
            object_codec.dump(object_codec.encode(value, key_of(path)))
            for path, value in zip(paths, objects, strict=True)
        ]
        if self._constant is None or any(
            not _fits(archive, length) for archive, (_, length) in zip(archives, self._slots, strict=True)
        ):
            self._slots = _make_slots(archives)
            placed = [
                (path, self._object_file, offset, length)
                for path, (offset, length) in zip(paths, self._slots, strict=True)
            ]
            table, number = make_table(self.layout, self._lanes, describe(self.layout, "dcp"), self._checksum)
            self._constant = (table, number, self._catalog(placed))
        table, number, catalog = self._constant
        blob = b"".join(
            _fill(archive, offset, length) for archive, (offset, length) in zip(archives, self._slots, strict=True)
        )
        extras = (Extra(self._object_file, 0, memoryview(blob), self._slots),) if archives else ()
        return Sealed(table, number, extras, catalog)

    def _catalog(self, objects: Sequence[tuple[Path, str, int, int]]) -> dict[str, Any]:
        structure, layout = self.layout.structure, self.layout
        item_of = {item.stored: item for item in layout.items}
        tensors = []
        for path, number, shard in zip(structure.tensor_paths, structure.stored_of, structure.shards, strict=True):
            stored, item = structure.stored[number], item_of[number]
            whole = stored.shape if shard is None else shard.shape
            offsets = [0] * len(whole) if shard is None else shard.offsets
            dtype = str(stored.dtype).removeprefix("torch.")
            place = [layout.files[item.file].name, item.offset, item.length]
            tensors.append([list(path), dtype, list(whole), list(offsets), list(stored.shape), *place])
        return {
            "tensors": tensors,
            "objects": [[list(path), name, offset, length] for path, name, offset, length in objects],
            "lists": [list(path) for path, kind in structure.containers if kind == "list"],
        }


def _metadata(catalogs: Sequence[Mapping[str, Any]]) -> bytes:
    chunks: dict[str, TensorStorageMetadata] = {}
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    mapping: dict[str, tuple[Any, ...]] = {}
    lists = {tuple(path) for catalog in catalogs for path in catalog["lists"]}
    # One object for what is equal, which the pickle then writes once: half of the time and of the bytes.
    properties, sizes_of = _Once(_properties), _Once(torch.Size)
    for catalog in catalogs:
        for path, dtype, whole, offsets, sizes, name, offset, length in catalog["tensors"]:
            key, origin = key_of(path), sizes_of[tuple(offsets)]
            known = chunks.get(key)
            if known is None:
                known = TensorStorageMetadata(properties[dtype], sizes_of[tuple(whole)], [])
                entries[key] = chunks[key] = known
                mapping[key] = _stock_path(tuple(path), lists)
            index = MetadataIndex(key, origin, len(known.chunks))
            if index in storage:
                continue  # tied on one rank and not on another: both have stored it
            known.chunks.append(ChunkStorageMetadata(origin, sizes_of[tuple(sizes)]))
            storage[index] = _StorageInfo(name, offset, length)
        for path, name, offset, length in catalog["objects"]:
            key = key_of(path)
            entries[key] = BytesStorageMetadata()
            storage[MetadataIndex(key)] = _StorageInfo(name, offset, length)
            mapping[key] = _stock_path(tuple(path), lists)
    # No storage_meta: torch would put a pathlib path there, which other Python versions cannot unpickle.
    stream = io.BytesIO()
    pickle.Pickler(stream, protocol=4).dump(Metadata(entries, mapping, storage))
    return stream.getvalue()


class _Once(dict[Any, Any]):
    """A value by its key, made when first asked for."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> Any:
        value = self[key] = self._make(key)
        return value


def _properties(dtype: str) -> TensorProperties:
    return TensorProperties(dtype=getattr(torch, dtype))


def _stock_path(path: Path, lists: set[Path]) -> tuple[Any, ...]:
    """A path as stock DCP notes it: dict keys are text, list positions are numbers."""
    return tuple(part if path[:depth] in lists else str(part) for depth, part in enumerate(path))


def _make_slots(archives: Sequence[bytes]) -> list[tuple[int, int]]:
    slots, position = [], 0
    for archive in archives:
        room = min(len(archive) // 4, _MOST_ROOM)
        length = align(len(archive) + room, ITEM_ALIGNMENT)
        slots.append((position, length))
        position += length
    return slots


def _fits(archive: bytes, length: int) -> bool:
    return length - 0xFFFF <= len(archive) <= length


def _fill(archive: bytes, offset: int, length: int) -> bytes:
    """An archive that fills its slot: the room is declared as the zip comment, so it stays a valid archive."""
    room = length - len(archive)
    if archive[-_END_RECORD_BYTES : -_END_RECORD_BYTES + 4] != _END_OF_ARCHIVE:
        raise ValueError(f"torch.save ended the object at {offset} in an unknown way.")
    return archive[:-2] + struct.pack("<H", room) + bytes(room)
