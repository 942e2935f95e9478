"""Our own checkpoints of the formats `dcp` and `safetensors`: read by the integrity tables, every item verified."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import compress, repeat
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointCorruptError, CheckpointLoadError
from ..image.arena import tensor_bytes
from ..memory.int_columns import column_of, picked, rows_of, where
from ..memory.scratch import Blocks
from ..state.flatten import Path, key_of, keys_of
from ..state.shards import overlap
from ..storage.checksum import Checksum, ChecksumMissingError, find_checksum, install_text
from .coalesced import BLOCK_BYTES, SMALL_BYTES, Landings, Run
from .foreign.archives import load_object
from .items import StoredItem
from .ranges import OpenFiles, Piece
from .shapes import check_cover
from .source import Index, Request, Source, TensorEntry, copy_into
from .tables import Part, RankTable


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
    items = table.items_in(name)
    with OpenFiles(folder) as files:

        def check(item: StoredItem) -> None:
            if files.checksum(name, item.offset, item.length, checksum) != item.checksum:
                raise damaged(folder, name, f"The item at bytes {item.offset} to {item.offset + item.length}")

        files.read_all([Piece(name, item.offset, item.length, partial(check, item)) for item in items])


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


class _Small(NamedTuple):
    """Requests for whole small tensors of one rank: the numbers of their items, and where each one's memory begins."""

    rank: int
    numbers: torch.Tensor
    addresses: torch.Tensor
    wanted: Sequence[Request]


class NativeSource(Source):
    """A checkpoint with integrity tables that say where every payload is.

    Args:
        folder: the checkpoint.
        tables: of `read_tables`.
        verify: compare the checksum of everything that is read.
        shared: as for `OpenFiles`.

    Raises:
        CheckpointCorruptError: the tables contradict each other, or tensors have holes or overlapping parts.
        CheckpointLoadError: a checksum that cannot be computed here.
    """

    def __init__(self, folder: str, tables: Sequence[RankTable], *, verify: bool, shared: bool = True) -> None:
        self._tables = tables
        self._shared = shared
        self._checksums = [checksum_of(folder, table) if verify else None for table in tables]
        #: Of tensors that consist of one item, by far the most: the table's number, and the item's.
        self._whole: dict[str, tuple[int, int]] = {}
        #: Of the others, by their offsets.
        self._chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
        self._objects: dict[str, Chunk] = {}
        index = Index()
        containers: dict[tuple[Path, str], None] = {}
        for number, table in enumerate(tables):
            self._add_tensors(folder, index, number)
            for path, item in table.objects:
                key = key_of(path)
                self._objects[key] = Chunk((), item, self._checksums[number])
                index.objects[key] = path
            containers.update(dict.fromkeys(table.containers))
        index.containers = list(containers)
        super().__init__(folder, index)
        for key, chunks in self._chunks.items():
            boxes = [(chunk.offsets, chunk.item.shape) for chunk in chunks.values()]
            check_cover(f"'{key}' in {folder}", index.tensors[key].shape, boxes)

    def _add_tensors(self, folder: str, index: Index, rank: int) -> None:
        """Take in one rank's tensors, of which there may be a hundred thousand: all at once where that can be."""
        items, (paths, numbers, parts) = self._tables[rank].tensors, self._tables[rank].keys
        keys, whole = keys_of(paths), self._whole
        dtypes = list(map(items.dtypes.__getitem__, numbers))
        shapes = list(map(items.shapes.__getitem__, numbers))
        places = list(zip(repeat(rank), numbers, strict=False))
        entries = rows_of(TensorEntry, paths, dtypes, shapes, places)
        if parts is None and len(set(keys)) == len(keys) and index.tensors.keys().isdisjoint(keys):
            index.tensors.update(zip(keys, entries, strict=True))
            whole.update(zip(keys, places, strict=True))
            return
        for key, entry, place, part in zip(keys, entries, places, parts or repeat(None), strict=False):
            if part is None and key not in index.tensors:
                index.tensors[key], whole[key] = entry, place
                continue
            if key in whole:
                first = self._whole_chunk(whole.pop(key))
                self._chunks[key] = {first.offsets: first}
            self._add_part(folder, index, key, entry, part)

    def _add_part(self, folder: str, index: Index, key: str, entry: TensorEntry, part: Part | None) -> None:
        place: tuple[int, int] = entry.same_as
        chunk = self._whole_chunk(place)
        whole, offsets = part or (entry.shape, chunk.offsets)
        # The same part twice: it was tied on one rank and not on another.
        self._chunks.setdefault(key, {}).setdefault(offsets, chunk._replace(offsets=offsets))
        same_as = place if part is None else key
        known = index.tensors.setdefault(key, entry._replace(shape=whole, same_as=same_as))
        if (known.dtype, known.shape) != (entry.dtype, whole):
            raise CheckpointCorruptError(
                f"'{key}' in {folder} is {known.dtype} {known.shape} on one rank and {entry.dtype} {whole} on another."
            )

    def _whole_chunk(self, place: tuple[int, int]) -> Chunk:
        """An item as the whole of a tensor."""
        rank, number = place
        item = self._tables[rank].tensors.item(number)
        return Chunk((0,) * len(item.shape), item, self._checksums[rank])

    def read_tensors(self, requests: Sequence[Request]) -> None:
        """A large item by one vectored read, whose payload goes straight into the tensor; small ones many at a time."""
        small, large = self._divided(requests)
        with OpenFiles(self.where, shared=self._shared) as files, Blocks(BLOCK_BYTES) as blocks:

            def read_run(run: Run, wanted: Sequence[Request]) -> None:
                with blocks.lent() as block:
                    wrong = run.read(files, block)
                if wrong is not None:
                    raise damaged(self.where, run.name, f"'{wanted[run.landings.order[wrong]].key}'")

            pieces = []
            for rank, numbers, addresses, wanted in small:
                targets = [request.destination for request in wanted]
                items, checksum = self._tables[rank].tensors, self._checksums[rank]
                for run in Landings(items, numbers, targets, addresses, checksum).runs():
                    pieces.append(Piece(run.name, run.offset, run.length, partial(read_run, run, wanted)))
            for request in large:
                for chunk in self._pieces(request):
                    item = chunk.item
                    read = partial(self._read, request, chunk, files)
                    pieces.append(Piece(item.file, item.offset, item.length, read))
            files.read_all(pieces)

    def _divided(self, requests: Sequence[Request]) -> tuple[list[_Small], list[Request]]:
        """What can be read in runs, by rank; and the rest."""
        if not requests:
            return [], []
        places = map(self._whole.get, map(itemgetter(0), requests))
        chosen: dict[int, list[tuple[int, int, Request]]] = defaultdict(list)
        large: list[Request] = []
        for request, place in zip(requests, places, strict=True):
            if place is None or request.offsets is not None or request.address is None:
                large.append(request)
            else:
                rank, number = place
                chosen[rank].append((number, request.address, request))
        small = []
        for rank, rows in chosen.items():
            found, starts, wanted = zip(*rows, strict=True)
            numbers, addresses = column_of(found), column_of(starts)
            fits = picked(self._tables[rank].tensors.length, numbers) <= SMALL_BYTES
            if not fits.all():
                large += compress(wanted, (~fits).tolist())
                kept = where(fits)
                numbers, addresses = picked(numbers, kept), picked(addresses, kept)
                wanted = tuple(compress(wanted, fits.tolist()))
            if wanted:
                small.append(_Small(rank, numbers, addresses, wanted))
        return small, large

    def _pieces(self, request: Request) -> list[Chunk]:
        """The chunks that hold something of what is asked for."""
        if request.key in self._whole:
            chunks = [self._whole_chunk(self._whole[request.key])]
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
                whole = files.fill(item.file, data, item.offset)
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
            copy_into(target, landing, request.key)
        else:
            common = overlap((chunk.offsets, item.shape), request.box)
            if common is not None:
                copy_into(target[common[1]], landing[common[0]], request.key)


def _is_direct(request: Request, chunk: Chunk) -> bool:
    """Whether a payload's bytes are the destination's, as they lie in memory."""
    return request.address is not None and request.box == (chunk.offsets, chunk.item.shape)
