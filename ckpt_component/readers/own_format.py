"""Our own checkpoints of the formats `dcp` and `safetensors`: read by the rank indexes, every item verified."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointCorruptError, CheckpointLoadError
from ..image.arena import tensor_bytes
from ..memory.int_columns import rows_of
from ..state.flatten import Path, key_of, keys_of
from ..state.shards import overlap
from ..storage.checksum import Checksum, ChecksumMissingError, find_checksum, install_text
from .coalesced import SMALL_BYTES, CoalescedRead, ReadTargets
from .file_set import CHUNK_BYTES, FileSet, RangeRead
from .foreign.archives import load_object
from .rank_index import Part, RankIndex, StoredItem
from .shapes import check_cover
from .source import Index, Request, Source, TensorEntry, copy_into


def checksum_of(folder: str, index: RankIndex) -> Checksum:
    """The algorithm of the checksums of a rank's items.

    Raises:
        CheckpointLoadError: it cannot be computed here; the text says what to install.
    """
    try:
        return find_checksum(index.checksum)
    except ChecksumMissingError as error:
        raise CheckpointLoadError(
            f"{folder} was saved with the checksum {index.checksum}, whose package is not installed here: "
            f"{install_text(index.checksum)}, or load it unverified with checkpoint.verify=off."
        ) from error
    except ValueError as error:
        raise CheckpointLoadError(
            f"{folder} was saved with the checksum {index.checksum!r:.200}, which this release does not know; load it "
            "with the release that wrote it, or unverified with checkpoint.verify=off."
        ) from error


def verify_file(folder: str, name: str, index: RankIndex) -> None:
    """Read every item of one file and compare its checksum."""
    checksum = checksum_of(folder, index)
    items = [*map(index.tensors.item, range(len(index.tensors.shapes))), *index.extras]
    with FileSet(folder) as files:

        def check(item: StoredItem) -> None:
            buffer = memoryview(bytearray(min(item.length, CHUNK_BYTES)))
            parts = (buffer[: item.length - start] for start in range(0, item.length, CHUNK_BYTES))
            if files.fill_summed(name, parts, item.offset, checksum) != item.checksum:
                raise _damaged(folder, name, f"The item at bytes {item.offset} to {item.offset + item.length}")

        files.read_all(
            [RangeRead(name, item.offset, item.length, partial(check, item)) for item in items if item.file == name]
        )


def _damaged(folder: str, name: str, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{what} of {os.path.join(folder, name)} is damaged: the bytes do not match the checksum taken at the save."
    )


class Chunk(NamedTuple):
    """A stored part of a tensor: where it begins in the whole, the item that holds it, and the item's checksum."""

    offsets: tuple[int, ...]
    item: StoredItem
    checksum: Checksum | None


class OwnSource(Source):
    """A checkpoint with rank indexes that say where every payload is.

    Args:
        folder: the checkpoint.
        ranks: of `read_rank_indexes`.
        verify: compare the checksum of everything that is read.
        shared: as for `FileSet`.

    Raises:
        CheckpointCorruptError: the indexes contradict each other, or tensors have holes or overlapping parts.
        CheckpointLoadError: a checksum that cannot be computed here.
    """

    def __init__(self, folder: str, ranks: Sequence[RankIndex], *, verify: bool, shared: bool = True) -> None:
        self.where = folder
        self.index = index = Index()
        self._ranks = ranks
        self._shared = shared
        self._checksums = [checksum_of(folder, rank) if verify else None for rank in ranks]
        #: Of tensors that consist of one item, by far the most: number of the rank, and of the item.
        self._whole: dict[str, tuple[int, int]] = {}
        #: Of the others, by their offsets.
        self._chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
        self._objects: dict[str, Chunk] = {}
        containers: dict[tuple[Path, str], None] = {}
        for number, rank in enumerate(ranks):
            self._add_tensors(number)
            for path, item in rank.objects:
                key = key_of(path)
                self._objects[key] = Chunk((), item, self._checksums[number])
                index.objects[key] = path
            containers.update(dict.fromkeys(rank.containers))
        index.containers = list(containers)
        for key, chunks in self._chunks.items():
            boxes = [(chunk.offsets, chunk.item.shape) for chunk in chunks.values()]
            check_cover(f"'{key}' in {folder}", index.tensors[key].shape, boxes)

    def _add_tensors(self, rank: int) -> None:
        """Add one rank's tensors, of which there may be a hundred thousand: all at once where that is possible."""
        items, (paths, numbers, parts) = self._ranks[rank].tensors, self._ranks[rank].keys
        tensors, whole, keys = self.index.tensors, self._whole, keys_of(paths)
        dtypes = map(items.dtypes.__getitem__, numbers)
        shapes = map(items.shapes.__getitem__, numbers)
        places = list(zip(repeat(rank), numbers, strict=False))
        entries = rows_of(TensorEntry, paths, dtypes, shapes, places)
        if parts is None and len(set(keys)) == len(keys) and tensors.keys().isdisjoint(keys):
            tensors.update(zip(keys, entries, strict=True))
            whole.update(zip(keys, places, strict=True))
            return
        for key, entry, place, part in zip(keys, entries, places, parts or repeat(None), strict=False):
            if part is None and key not in tensors:
                tensors[key], whole[key] = entry, place
                continue
            if key in whole:
                first = self._chunk(whole.pop(key))
                self._chunks[key] = {first.offsets: first}
            self._add_part(key, entry, part)

    def _add_part(self, key: str, entry: TensorEntry, part: Part | None) -> None:
        chunk = self._chunk(entry.same_as)
        shape, offsets = part or (entry.shape, chunk.offsets)
        # The same part twice: it was tied on one rank and not on another.
        self._chunks.setdefault(key, {}).setdefault(offsets, chunk._replace(offsets=offsets))
        same_as = entry.same_as if part is None else key
        known = self.index.tensors.setdefault(key, entry._replace(shape=shape, same_as=same_as))
        if (known.dtype, known.shape) != (entry.dtype, shape):
            raise CheckpointCorruptError(
                f"'{key}' in {self.where} is {known.dtype} {known.shape} on one rank and {entry.dtype} {shape} on "
                "another."
            )

    def _chunk(self, place: tuple[int, int]) -> Chunk:
        """An item as the whole of a tensor."""
        rank, number = place
        item = self._ranks[rank].tensors.item(number)
        return Chunk((0,) * len(item.shape), item, self._checksums[rank])

    def read_tensors(self, requests: Sequence[Request]) -> None:
        """Read small items many at a time, and the payloads of others straight into their tensors."""
        small = [(rank.tensors.length <= SMALL_BYTES).tolist() for rank in self._ranks]
        coalesced: dict[int, list[tuple[int, Request]]] = defaultdict(list)
        reads = []
        with FileSet(self.where, shared=self._shared) as files:
            for request, place in zip(requests, map(self._whole.get, map(itemgetter(0), requests)), strict=True):
                plain = place is not None and request.offsets is None and request.address is not None
                if place is not None and plain and small[place[0]][place[1]]:
                    coalesced[place[0]].append((place[1], request))
                    continue
                for chunk in self._chunks_of(request):
                    read = partial(self._read_chunk, request, chunk, files)
                    reads.append(RangeRead(chunk.item.file, chunk.item.offset, chunk.item.length, read))
            for rank, rows in coalesced.items():
                numbers, chosen = zip(*rows, strict=True)
                targets = ReadTargets(self._ranks[rank].tensors, numbers, chosen, self._checksums[rank])
                for each in targets.reads:
                    fill = partial(self._fill_targets, targets, each, files)
                    reads.append(RangeRead(each.file, each.offset, each.length, fill))
            files.read_all(reads)

    def _fill_targets(self, targets: ReadTargets, read: CoalescedRead, files: FileSet) -> None:
        wrong = targets.fill(read, files)
        if wrong is not None:
            raise _damaged(self.where, read.file, f"'{wrong.key}'")

    def _chunks_of(self, request: Request) -> list[Chunk]:
        """The chunks that hold a part of what is requested."""
        place = self._whole.get(request.key)
        stored = list(self._chunks[request.key].values()) if place is None else [self._chunk(place)]
        if len(stored) == 1 and request.offsets is None:
            return stored
        chunks, elements = [], 0
        for chunk in stored:
            common = overlap((chunk.offsets, chunk.item.shape), request.box)
            if common is not None:
                chunks.append(chunk)
                elements += common[2]
        if elements != request.destination.numel():
            raise CheckpointCorruptError(f"What {self.where} holds of '{request.key}' does not make up the tensor.")
        return chunks

    def _read_chunk(self, request: Request, chunk: Chunk, files: FileSet) -> None:
        item, target, box = chunk.item, request.destination, (chunk.offsets, chunk.item.shape)
        direct = request.address is not None and request.box == box
        landing = target if direct else torch.empty(item.shape, dtype=item.dtype)
        payload = tensor_bytes(landing)
        before = item.payload - item.offset
        after = item.length - before - payload.nbytes
        buffers = [memoryview(bytearray(before)), payload, memoryview(bytearray(after))]
        checksum = files.fill_summed(item.file, buffers, item.offset, chunk.checksum)
        if checksum is None or (chunk.checksum is not None and checksum != item.checksum):
            raise _damaged(self.where, item.file, f"'{request.key}'")
        if direct:
            torch.autograd.graph.increment_version(target)
        elif request.box == box:
            copy_into(target, landing, request.key)
        elif (common := overlap(box, request.box)) is not None:
            copy_into(target[common[1]], landing[common[0]], request.key)

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Decode the objects, each verified."""
        values: dict[str, Any] = {}
        with FileSet(self.where) as files:
            for key in keys:
                _, item, expected = self._objects[key]
                data = memoryview(bytearray(item.length))
                checksum = files.fill_summed(item.file, [data], item.offset, expected)
                if checksum is None or (expected is not None and checksum != item.checksum):
                    raise _damaged(self.where, item.file, f"'{key}'")
                values[key] = load_object(data, f"'{key}' in {os.path.join(self.where, item.file)}")
        return values
