"""Our own checkpoints of the formats `dcp` and `safetensors`: read through the rank indexes, every item verified."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ..core.formats.rank_index import Part, RankIndex, StoredItem
from ..core.formats.verification import checksum_of
from ..core.image.arena import tensor_bytes
from ..core.progress import Progress, no_progress
from ..core.state.boxes import overlap
from ..core.state.coverage import check_cover
from ..core.state.int_columns import rows_of
from ..core.state.paths import Path, keys_of
from ..core.storage.checksum import Checksum
from ..core.storage.file_set import FileSet, RangeRead
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError
from .coalesced import DTYPES, SMALL_BYTES, CoalescedReads, TensorItems
from .foreign.archives import load_objects
from .source import Index, Request, Source, TensorEntry, copy_into


class Chunk(NamedTuple):
    """A stored part of a tensor, or an object: its offsets in the whole, its item, and the checksum algorithm."""

    offsets: tuple[int, ...]
    item: StoredItem
    checksum: Checksum | None


class OwnSource(Source):
    """A checkpoint whose rank indexes locate every payload.

    Args:
        fs: The storage.
        folder: The folder of the files.
        ranks: The indexes, from `read_rank_indexes`.
        verify: Verify the checksum of everything that is read.
        shared: As for `Storage.open_files`.

    Raises:
        CheckpointCorruptError: The indexes contradict each other, or tensors have holes or overlapping parts.
        CheckpointLoadError: A checksum cannot be computed here.
    """

    def __init__(
        self, fs: Storage, folder: str, ranks: Sequence[RankIndex], *, verify: bool, shared: bool = True
    ) -> None:
        self._fs = fs
        self.where = self._folder = folder
        self.index = index = Index()
        self._ranks = ranks
        self._items = [TensorItems(rank.tensors) for rank in ranks]
        self._shared = shared
        self._checksums: list[Checksum | None] = []
        #: Chunks of tensors stored in several parts, by key and offsets. All other tensors, the vast majority, are one
        #: item each: `same_as` of their entries is (rank number, item number).
        self._chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
        self._objects: dict[str, Chunk] = {}
        containers: dict[tuple[Path, str], None] = {}
        for number, rank in enumerate(ranks):
            checksum = checksum_of(folder, rank.checksum) if verify else None
            self._checksums.append(checksum)
            self._add_tensors(number)
            for key, (path, item) in zip(keys_of([path for path, _ in rank.objects]), rank.objects, strict=True):
                self._objects[key] = Chunk((), item, checksum)
                index.objects[key] = path
            containers.update(dict.fromkeys(rank.containers))
        index.containers = list(containers)
        for key, chunks in self._chunks.items():
            boxes = [(chunk.offsets, chunk.item.shape) for chunk in chunks.values()]
            check_cover(f"'{key}' in {folder}", index.tensors[key].shape, boxes)

    def _add_tensors(self, number: int) -> None:
        """Add one rank's tensors, possibly a hundred thousand: all at once if possible."""
        rank, tensors = self._ranks[number], self.index.tensors
        keys = keys_of(rank.paths)
        dtypes = map(self._items[number].dtypes.__getitem__, rank.numbers)
        shapes = map(rank.tensors.shapes.__getitem__, rank.numbers)
        entries = rows_of(TensorEntry, rank.paths, dtypes, shapes, zip(repeat(number), rank.numbers, strict=False))
        if rank.parts is None and len(set(keys)) == len(keys) and tensors.keys().isdisjoint(keys):
            tensors.update(zip(keys, entries, strict=True))
            return
        for key, entry, part in zip(keys, entries, rank.parts or repeat(None), strict=False):
            if part is None and key not in tensors:
                tensors[key] = entry
            else:
                self._add_part(key, entry, part)

    def _add_part(self, key: str, entry: TensorEntry, part: Part | None) -> None:
        chunk = self._chunk(entry.same_as)
        shape, offsets = part or (entry.shape, chunk.offsets)
        whole = self.index.tensors.get(key)
        if whole is None:
            whole = entry._replace(shape=shape)
        elif key not in self._chunks:
            first = self._chunk(whole.same_as)
            self._chunks[key] = {first.offsets: first}
        if (whole.dtype, whole.shape) != (entry.dtype, shape):
            raise CheckpointCorruptError(
                f"'{key}' in {self.where} is {whole.dtype} {whole.shape} on one rank and {entry.dtype} {shape} on "
                "another."
            )
        self.index.tensors[key] = whole._replace(same_as=key)
        # The same part can occur twice: tied on one rank and not on another.
        self._chunks.setdefault(key, {}).setdefault(offsets, chunk._replace(offsets=offsets))

    def _chunk(self, place: tuple[int, int]) -> Chunk:
        """The chunk of a tensor stored as one item."""
        rank, number = place
        item = self._ranks[rank].tensors.item(number)
        return Chunk((0,) * len(item.shape), item, self._checksums[rank])

    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """Read small items many at a time, and larger payloads directly into their tensors."""
        small = [(items.table[2] <= SMALL_BYTES).tolist() for items in self._items]
        coalesced: dict[int, list[tuple[int, Request]]] = defaultdict(list)
        entries = map(self.index.tensors.__getitem__, map(attrgetter("key"), requests))
        reads = []
        with self._fs.open_files(self._folder, shared=self._shared) as files:
            for request, place in zip(requests, map(attrgetter("same_as"), entries), strict=True):
                if type(place) is tuple and request.offsets is None and request.address is not None:
                    rank, number = place
                    if small[rank][number]:
                        coalesced[rank].append((number, request))
                        continue
                for chunk in self._chunks_of(request):
                    read = partial(self._read_chunk, request, chunk, files)
                    reads.append(RangeRead(chunk.item.file, chunk.item.offset, chunk.item.length, read))
            for rank, rows in coalesced.items():
                numbers, group = zip(*rows, strict=True)
                reads += CoalescedReads(self._items[rank], numbers, group, self._checksums[rank], files).ranges
            files.read_all(reads, progress, inside=torch.no_grad)  # leaf tensors may be filled

    def _chunks_of(self, request: Request) -> list[Chunk]:
        """The chunks that overlap the requested part."""
        parts = self._chunks.get(request.key)
        stored = [self._chunk(self.index.tensors[request.key].same_as)] if parts is None else list(parts.values())
        if len(stored) == 1 and request.offsets is None:
            return stored
        chunks, elements = [], 0
        for chunk in stored:
            common = overlap((chunk.offsets, chunk.item.shape), request.box)
            if common is not None:
                chunks.append(chunk)
                elements += common[2]
        if elements != request.destination.numel():
            raise CheckpointCorruptError(f"The parts of '{request.key}' in {self.where} do not make up the tensor.")
        return chunks

    def _read_chunk(self, request: Request, chunk: Chunk, files: FileSet) -> None:
        item, target, box = chunk.item, request.destination, (chunk.offsets, chunk.item.shape)
        direct = request.address is not None and request.box == box
        landing = target if direct else torch.empty(item.shape, dtype=DTYPES[str(item.dtype)])
        payload = tensor_bytes(landing)
        before = item.payload - item.offset
        after = item.length - before - payload.nbytes
        buffers = [memoryview(bytearray(before)), payload, memoryview(bytearray(after))]

        def damage() -> str | None:
            checksum = files.fill_summed(item.file, buffers, item.offset, chunk.checksum)
            is_whole = checksum is not None and (chunk.checksum is None or checksum == item.checksum)
            return None if is_whole else f"'{request.key}'"

        if damaged := files.verified(item.file, item.offset, item.length, damage):
            raise files.damaged(item.file, damaged)
        if direct:
            torch.autograd.graph.increment_version(target)
        elif request.box == box:
            copy_into(target, landing, request.key)
        elif (common := overlap(box, request.box)) is not None:
            copy_into(target[common[1]], landing[common[0]], request.key)

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Verify and decode the objects."""
        archives: dict[str, memoryview] = {}
        with self._fs.open_files(self._folder) as files:
            for key in keys:
                _, item, checksum = self._objects[key]
                data = memoryview(bytearray(item.length))
                damage = partial(_damage, key, item, checksum, data, files)
                if damaged := files.verified(item.file, item.offset, item.length, damage):
                    raise files.damaged(item.file, damaged)
                archives[f"'{key}' in {os.path.join(self._folder, item.file)}"] = data
        return dict(zip(keys, load_objects(archives), strict=True))


def _damage(key: str, item: StoredItem, checksum: Checksum | None, data: memoryview, files: FileSet) -> str | None:
    """Read an object; returns its name if it is damaged."""
    whole = files.fill(item.file, data, item.offset)
    return None if whole and (checksum is None or checksum.of(data) == item.checksum) else f"'{key}'"
