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
from ..image.tree import key_of
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


class NativeSource(Source):
    """A checkpoint with integrity tables that say where every payload is."""

    def __init__(self, fs: FsOps, folder: str, manifest: Mapping[str, Any]) -> None:
        self._items: dict[str, StoredItem] = {}
        index = Index()
        for rank, table in enumerate(read_tables(fs, folder, manifest)):
            for raw, number in table.layout["keys"]:
                path, item = tuple(raw), table.items[number]
                key = key_of(path)
                if item.dtype is None:
                    raise CheckpointCorruptError(f"'{key}' in {folder} has no dtype.")
                self._items[key] = item
                index.tensors[key] = TensorEntry(path, item.dtype, torch.Size(item.shape), (rank, number))
            for raw, number in table.layout["objects"]:
                path = tuple(raw)
                self._items[key_of(path)] = table.items[number]
                index.objects[key_of(path)] = path
            index.containers += [(tuple(raw), kind) for raw, kind in table.layout["containers"]]
        super().__init__(folder, index)

    def read_tensors(self, requests: Sequence[Request]) -> None:
        """Each item by one vectored read: the payload straight into the tensor, what surrounds it aside."""
        ordered = sorted(requests, key=lambda request: self._place(request.key))
        with OpenFiles(self.where) as files:
            for request in ordered:
                files.descriptor(self._items[request.key].file)
            sizes = [self._items[request.key].length for request in ordered]
            in_parallel(ordered, sizes, lambda request: self._read(files, request))

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Decode the objects, each verified."""
        found: dict[str, Any] = {}
        with OpenFiles(self.where) as files:
            for key in keys:
                item = self._items[key]
                data = memoryview(bytearray(item.length))
                whole = read_full(files.descriptor(item.file), [data], item.offset)
                if not whole or zlib.crc32(data) != item.crc32:
                    raise damaged(self.where, item.file, f"'{key}'")
                found[key] = object_codec.load(data)
        return found

    def _place(self, key: str) -> tuple[str, int]:
        item = self._items[key]
        return item.file, item.offset

    def _read(self, files: OpenFiles, request: Request) -> None:
        item, target = self._items[request.key], request.destination
        direct = target.device.type == "cpu" and target.is_contiguous() and not (target.is_conj() or target.is_neg())
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
        else:
            target.copy_(landing)


def _dtype(path: str, name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointCorruptError(f"{path} names the dtype {name!r}, which this torch does not have.")
    return found
