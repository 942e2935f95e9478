"""Our own checkpoints of the formats `dcp` and `safetensors`: read by the integrity tables, every item verified."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointCorruptError
from ..image import objects as object_codec
from ..image.arena import tensor_bytes
from ..image.shards import overlap
from ..image.tree import Path, key_of
from ..storage.fs import FsOps
from .ranges import OpenFiles, crc_of, crc_of_range, in_parallel, read_full
from .source import Index, Request, Source, TensorEntry

_MAX_TABLE_BYTES = 1 << 30


@dataclass(frozen=True)
class StoredItem:
    """One item of an integrity table: where it is, where its payload starts in the file, and its CRC."""

    file: str
    offset: int
    length: int
    payload: int
    crc32: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RankTable:
    """What one rank wrote, as its integrity file tells it."""

    items: list[StoredItem]
    layout: Mapping[str, Any]


def read_tables(fs: FsOps, folder: str, manifest: Mapping[str, Any]) -> list[RankTable]:
    """The integrity tables of all ranks, each verified against the manifest.

    Raises:
        CheckpointCorruptError: one is missing, damaged, or makes no sense.
    """
    tables = []
    for entry in manifest["files"]:
        name = entry["name"]
        if not (name.startswith("integrity-") and name.endswith(".json")):
            continue
        path = os.path.join(folder, name)
        try:
            data = fs.read(path, _MAX_TABLE_BYTES)
        except OSError as error:
            raise CheckpointCorruptError(f"{path} cannot be read: {error}.") from error
        if zlib.crc32(data) != entry["crc32"]:
            raise CheckpointCorruptError(f"{path} does not match its checksum in the manifest.")
        content = json.loads(data)
        layout = content["layout"]
        names = layout["files"]
        crcs = content["crc32"]
        items = [
            StoredItem(names[file], offset, length, payload, crc, _dtype(path, dtype), tuple(shape))
            for (file, offset, length, payload, dtype, shape), crc in zip(layout["items"], crcs, strict=False)
        ]
        items += [
            StoredItem(file, offset, length, offset, crc, None, ())
            for (file, offset, length), crc in zip(content["extras"], crcs[len(items) :], strict=True)
        ]
        tables.append(RankTable(items, layout))
    return tables


def verify_all(folder: str, tables: Sequence[RankTable]) -> None:
    """Read every item and compare its CRC."""
    ranges = [(item.file, item.offset, item.length, item.crc32) for table in tables for item in table.items]
    with OpenFiles(folder) as files:
        for name, _, _, _ in ranges:
            files.descriptor(name)

        def check(place: tuple[str, int, int, int]) -> None:
            name, offset, length, crc = place
            if crc_of_range(files.descriptor(name), offset, length) != crc:
                raise damaged(folder, name, f"bytes {offset} to {offset + length}")

        in_parallel(ranges, [length for _, _, length, _ in ranges], check)


def damaged(folder: str, name: str, what: str) -> CheckpointCorruptError:
    """The error for bytes that are not those that were written."""
    return CheckpointCorruptError(
        f"{what} of {os.path.join(folder, name)} is damaged: the bytes do not match the checksum taken at the save."
    )


@dataclass(frozen=True)
class Chunk:
    """A stored part of a tensor: where it begins in the whole, and the item that holds it."""

    offsets: tuple[int, ...]
    item: StoredItem


class NativeSource(Source):
    """A checkpoint with integrity tables that say where every payload is."""

    def __init__(self, fs: FsOps, folder: str, manifest: Mapping[str, Any]) -> None:
        self._chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
        self._objects: dict[str, StoredItem] = {}
        index = Index()
        containers: dict[tuple[Path, str], None] = {}
        for rank, table in enumerate(read_tables(fs, folder, manifest)):
            for raw, number, *part in table.layout["keys"]:
                path, item = tuple(raw), table.items[number]
                key = key_of(path)
                if item.dtype is None:
                    raise CheckpointCorruptError(f"'{key}' in {folder} has no dtype.")
                whole, offsets = (part[0], tuple(part[1])) if part else (item.shape, (0,) * len(item.shape))
                # The same part twice: it was tied on one rank and not on another.
                self._chunks.setdefault(key, {}).setdefault(offsets, Chunk(offsets, item))
                entry = TensorEntry(path, item.dtype, torch.Size(whole), key if part else (rank, number))
                index.tensors.setdefault(key, entry)
            for raw, number in table.layout["objects"]:
                path = tuple(raw)
                self._objects[key_of(path)] = table.items[number]
                index.objects[key_of(path)] = path
            containers.update(dict.fromkeys((tuple(raw), kind) for raw, kind in table.layout["containers"]))
        index.containers = list(containers)
        super().__init__(folder, index)

    def read_tensors(self, requests: Sequence[Request]) -> None:
        """Each item by one vectored read; a whole payload goes straight into the tensor, what surrounds it aside."""
        pieces = [(request, chunk) for request in requests for chunk in self._pieces(request)]
        pieces.sort(key=lambda piece: (piece[1].item.file, piece[1].item.offset))
        with OpenFiles(self.where) as files:
            for _, chunk in pieces:
                files.descriptor(chunk.item.file)
            sizes = [chunk.item.length for _, chunk in pieces]
            in_parallel(pieces, sizes, lambda piece: self._read(files, *piece))

    def _pieces(self, request: Request) -> list[Chunk]:
        """The chunks that hold something of what is asked for."""
        chunks = list(self._chunks[request.key].values())
        if len(chunks) == 1 and request.offsets is None:
            return chunks
        found, elements = [], 0
        for chunk in chunks:
            common = overlap((chunk.offsets, chunk.item.shape), request.box)
            if common is not None:
                found.append(chunk)
                elements += common[2]
        if elements != request.destination.numel():
            raise CheckpointCorruptError(f"What {self.where} holds of '{request.key}' does not make up the tensor.")
        return found

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Decode the objects, each verified."""
        found: dict[str, Any] = {}
        with OpenFiles(self.where) as files:
            for key in keys:
                item = self._objects[key]
                data = memoryview(bytearray(item.length))
                whole = read_full(files.descriptor(item.file), [data], item.offset)
                if not whole or zlib.crc32(data) != item.crc32:
                    raise damaged(self.where, item.file, f"'{key}'")
                found[key] = object_codec.load(data)
        return found

    def _read(self, files: OpenFiles, request: Request, chunk: Chunk) -> None:
        item, target = chunk.item, request.destination
        exact = request.box == (chunk.offsets, item.shape)
        direct = (
            exact
            and target.device.type == "cpu"
            and target.is_contiguous()
            and not (target.is_conj() or target.is_neg())
        )
        landing = target if direct else torch.empty(item.shape, dtype=item.dtype)
        payload = tensor_bytes(landing)
        before = item.payload - item.offset
        after = item.length - before - payload.nbytes
        if before < 0 or after < 0:
            raise CheckpointCorruptError(f"'{request.key}' in {self.where} does not fit its place in {item.file}.")
        buffers = [memoryview(bytearray(before)), payload, memoryview(bytearray(after))]
        whole = read_full(files.descriptor(item.file), buffers, item.offset)
        if not whole or crc_of(buffers) != item.crc32:
            raise damaged(self.where, item.file, f"'{request.key}'")
        if direct:
            # The memory was written behind autograd's back, and others may watch the version.
            torch.autograd.graph.increment_version(target)
        elif exact:
            target.copy_(landing)
        else:
            common = overlap((chunk.offsets, item.shape), request.box)
            if common is not None:
                target[common[1]].copy_(landing[common[0]])


def _dtype(path: str, name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointCorruptError(f"{path} names the dtype {name!r}, which this torch does not have.")
    return found
