"""Our own checkpoints of the formats `dcp` and `safetensors`: read by the integrity tables, every item verified."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointCorruptError, CheckpointLoadError
from ..image.arena import tensor_bytes
from ..image.shards import overlap
from ..image.tree import Path, key_of
from ..storage.checksum import Checksum, ChecksumMissingError, find_checksum, install_text
from .archives import load_object
from .ranges import OpenFiles, in_parallel
from .runs import SMALL_BYTES, Gaps, Landing, read_run, runs_of
from .shapes import check_cover
from .source import Index, Request, Source, TensorEntry
from .tables import RankTable, StoredItem, StoredKey


def checksum_of(folder: str, table: RankTable) -> Checksum:
    """The algorithm that a table's items were stored with.

    Raises:
        CheckpointLoadError: it cannot be computed here; the text says what to install.
    """
    try:
        return find_checksum(table.checksum)
    except ChecksumMissingError as error:
        raise CheckpointLoadError(
            f"{folder} was saved with the checksum {table.checksum}, whose package is not installed here: "
            f"{install_text(table.checksum)}, or load it unverified with checkpoint.verify=off."
        ) from error
    except ValueError as error:
        raise CheckpointLoadError(
            f"{folder} was saved with the checksum {table.checksum!r:.200}, which this release does not know; load it "
            "with the release that wrote it, or unverified with checkpoint.verify=off."
        ) from error


def verify_file(folder: str, name: str, table: RankTable) -> None:
    """Read every item of one file and compare its checksum."""
    checksum = checksum_of(folder, table)
    items = [item for item in table.items if item.file == name]
    with OpenFiles(folder) as files:
        files.descriptor(name)

        def check(item: StoredItem) -> None:
            if files.checksum(name, item.offset, item.length, checksum) != item.checksum:
                raise damaged(folder, name, f"The item at bytes {item.offset} to {item.offset + item.length}")

        in_parallel(items, [item.length for item in items], check)


def damaged(folder: str, name: str, what: str) -> CheckpointCorruptError:
    """The error for bytes that are not those that were written."""
    return CheckpointCorruptError(
        f"{what} of {os.path.join(folder, name)} is damaged: the bytes do not match the checksum taken at the save."
    )


class Chunk(NamedTuple):
    """A stored part of a tensor: where it begins in the whole, the item that holds it, and the item's checksum."""

    offsets: tuple[int, ...]
    item: StoredItem
    checksum: Checksum | None


class NativeSource(Source):
    """A checkpoint with integrity tables that say where every payload is.

    Args:
        folder: the checkpoint.
        tables: of `read_tables`.
        verify: compare the checksum of everything that is read.

    Raises:
        CheckpointCorruptError: the tables contradict each other, or tensors have holes or overlapping parts.
        CheckpointLoadError: a checksum that cannot be computed here.
    """

    def __init__(self, folder: str, tables: Sequence[RankTable], *, verify: bool) -> None:
        #: Of tensors that consist of one item, by far the most.
        self._whole: dict[str, tuple[StoredItem, Checksum | None]] = {}
        #: Of the others, by their offsets.
        self._chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
        self._objects: dict[str, Chunk] = {}
        self._gaps = Gaps()
        index = Index()
        containers: dict[tuple[Path, str], None] = {}
        for rank, table in enumerate(tables):
            checksum = checksum_of(folder, table) if verify else None
            self._add_tensors(folder, index, table, rank, checksum)
            for path, number in table.objects:
                key = key_of(path)
                self._objects[key] = Chunk((), table.items[number], checksum)
                index.objects[key] = path
            containers.update(dict.fromkeys(table.containers))
        index.containers = list(containers)
        super().__init__(folder, index)
        for key, chunks in self._chunks.items():
            boxes = [(chunk.offsets, chunk.item.shape) for chunk in chunks.values()]
            check_cover(f"'{key}' in {folder}", index.tensors[key].shape, boxes)

    def _add_tensors(self, folder: str, index: Index, table: RankTable, rank: int, checksum: Checksum | None) -> None:
        """Take in one rank's tensors, of which there may be a hundred thousand."""
        items, tensors, whole, chunks = table.items, index.tensors, self._whole, self._chunks
        sizes: dict[tuple[int, ...], torch.Size] = {}
        for stored in table.keys:
            path, number, part = stored
            item, key = items[number], key_of(path)
            if part is None and key not in tensors and item.dtype is not None:
                size = sizes.get(item.shape) or sizes.setdefault(item.shape, torch.Size(item.shape))
                tensors[key] = TensorEntry(path, item.dtype, size, (rank, number))
                whole[key] = (item, checksum)
                continue
            if key in whole:
                first, its_checksum = whole.pop(key)
                origin = (0,) * len(first.shape)
                chunks[key] = {origin: Chunk(origin, first, its_checksum)}
            self._add_part(folder, index, stored, item, rank, checksum)

    def _add_part(
        self, folder: str, index: Index, stored: StoredKey, item: StoredItem, rank: int, checksum: Checksum | None
    ) -> None:
        if item.dtype is None:
            raise CheckpointCorruptError(f"'{key_of(stored.path)}' in {folder} has no dtype.")
        key = key_of(stored.path)
        whole, offsets = stored.part or (item.shape, (0,) * len(item.shape))
        # The same part twice: it was tied on one rank and not on another.
        self._chunks.setdefault(key, {}).setdefault(offsets, Chunk(offsets, item, checksum))
        same_as = (rank, stored.item) if stored.part is None else key
        known = index.tensors.setdefault(key, TensorEntry(stored.path, item.dtype, torch.Size(whole), same_as))
        if (known.dtype, tuple(known.shape)) != (item.dtype, tuple(whole)):
            raise CheckpointCorruptError(
                f"'{key}' in {folder} is {known.dtype} {tuple(known.shape)} on one rank and {item.dtype} "
                f"{tuple(whole)} on another."
            )

    def read_tensors(self, requests: Sequence[Request]) -> None:
        """A large item by one vectored read, whose payload goes straight into the tensor; small ones many at a time."""
        small: dict[tuple[str, Checksum | None], list[Landing]] = {}
        large: list[tuple[Request, Chunk]] = []
        whole = self._whole
        for request in requests:
            key, target, offsets = request
            item, checksum = whole.get(key, _NONE)
            if item is not None and offsets is None and item.length <= SMALL_BYTES and _is_plain(target):
                small.setdefault((item.file, checksum), []).append((item, request))
            else:
                large += [(request, chunk) for chunk in self._pieces(request)]
        work: list[tuple[str, int, int, Callable[[OpenFiles], None]]] = []
        for (name, checksum), landings in small.items():
            landings.sort(key=lambda landing: landing[0].offset)
            for run in runs_of(landings):
                start, (last, _) = run[0][0].offset, run[-1]
                length = last.offset + last.length - start
                work.append((name, start, length, partial(self._read_run, name, run, checksum)))
        for request, chunk in large:
            item = chunk.item
            work.append((item.file, item.offset, item.length, partial(self._read, request, chunk)))
        work.sort(key=lambda piece: piece[:3])
        with OpenFiles(self.where) as files:
            for name in {piece[0] for piece in work}:
                files.descriptor(name)
            in_parallel(work, [piece[2] for piece in work], lambda piece: piece[3](files))

    def _read_run(self, name: str, run: Sequence[Landing], checksum: Checksum | None, files: OpenFiles) -> None:
        wrong = read_run(files, name, run, checksum, self._gaps)
        if wrong is not None:
            raise damaged(self.where, name, f"'{wrong.key}'")
        # The memory was written behind autograd's back, and others may watch the version.
        torch.autograd.graph.increment_version([request.destination for _, request in run])

    def _pieces(self, request: Request) -> list[Chunk]:
        """The chunks that hold something of what is asked for."""
        if request.key in self._whole:
            item, checksum = self._whole[request.key]
            chunks = [Chunk((0,) * len(item.shape), item, checksum)]
        else:
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
                chunk = self._objects[key]
                item = chunk.item
                data = memoryview(bytearray(item.length))
                whole = files.fill(item.file, [data], item.offset)
                if not whole or (chunk.checksum is not None and chunk.checksum.of(data) != item.checksum):
                    raise damaged(self.where, item.file, f"'{key}'")
                found[key] = load_object(data, f"'{key}' in {os.path.join(self.where, item.file)}")
        return found

    def _read(self, request: Request, chunk: Chunk, files: OpenFiles) -> None:
        item, target = chunk.item, request.destination
        exact = request.box == (chunk.offsets, item.shape)
        direct = _is_direct(request, chunk)
        landing = target if direct else torch.empty(item.shape, dtype=item.dtype)
        payload = tensor_bytes(landing)
        before = item.payload - item.offset
        after = item.length - before - payload.nbytes
        buffers = [memoryview(bytearray(before)), payload, memoryview(bytearray(after))]
        found = files.fill_summed(item.file, buffers, item.offset, chunk.checksum)
        if found is None or (chunk.checksum is not None and found != item.checksum):
            raise damaged(self.where, item.file, f"'{request.key}'")
        if direct:
            torch.autograd.graph.increment_version(target)
        elif exact:
            target.copy_(landing)
        else:
            common = overlap((chunk.offsets, item.shape), request.box)
            if common is not None:
                target[common[1]].copy_(landing[common[0]])


#: In place of an item.
_NONE: tuple[StoredItem | None, Checksum | None] = (None, None)


def _is_direct(request: Request, chunk: Chunk) -> bool:
    """Whether a payload's bytes are the destination's, as they lie in memory."""
    return _is_plain(request.destination) and request.box == (chunk.offsets, chunk.item.shape)


def _is_plain(target: torch.Tensor) -> bool:
    """Whether a tensor's elements lie one after the other in the host's memory, as they are."""
    return target.is_cpu and target.is_contiguous() and not (target.is_conj() or target.is_neg())
