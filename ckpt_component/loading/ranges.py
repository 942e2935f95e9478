"""Checkpoints whose index locates every payload: ours, and safetensors files. Every item is verified as it is read."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from ..core.formats.index import Contents, Index, Place
from ..core.formats.rank_index import StoredRange, checksum_of
from ..core.formats.verification import Damage, verify_open_items
from ..core.progress import Progress, no_progress
from ..core.storage.checksum import Checksum
from ..core.storage.file_set import FileSet, RangeRead
from ..errors import CheckpointCorruptError
from ..state.coverage import overlap
from ..state.tensors import tensor_bytes
from .coalesced import SMALL_BYTES, CoalescedReads, TensorItems
from .foreign.archives import load_objects
from .source import Access, Request, Source, copy_into


class RangeSource(Source):
    """A checkpoint whose index locates every payload.

    Args:
        index: the checkpoint
        contents: what of it is loaded
        access: how it is read

    Raises:
        CheckpointLoadError: a checksum cannot be computed here
    """

    def __init__(self, index: Index, contents: Contents, access: Access) -> None:
        self.where, self.contents = index.where, contents
        self._storage, self._folder = index.storage, index.folder
        #: Opens the files.
        self._open: Callable[[], AbstractContextManager[FileSet]] = partial(access.open_files, index.folder)
        self._items = list(map(TensorItems, map(attrgetter("tensors"), contents.columns)))
        #: By name, as ranges have it. Those of files of other programs have none.
        self._checksums: dict[str | None, Checksum] = {}
        #: Names of files of which this rank has verified what it may read.
        self._known: Set[str] = frozenset[str]()
        if access.verify and index.manifest is not None:
            for name in map(attrgetter("checksum"), contents.columns):
                self._checksums[name] = checksum_of(self.where, name)
            self.verifies_first = index.storage.verifies_first

    @contextmanager
    def verified(self, rank: int, world_size: int) -> Iterator[None]:
        """Verify what some of the ranks wrote; the others' is verified by other ranks of this load.

        Where these may see other copies of it, this rank verifies also that, when it reads it.
        """
        columns = self.contents.columns[rank::world_size] if len(self.contents.columns) > 1 else self.contents.columns
        items = [item for each in columns for item in each.ranges()]
        with self._storage.open_files(self._folder) as files:
            verify_open_items(files, self._folder, items, _refuse)
            again = nullcontext(files)
            self._open = lambda: again
            if files.seen_by_all:
                self._checksums = {}
            self._known = {item.file for item in items}
            yield

    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """Read small items many at a time, and larger payloads directly into their tensors."""
        entries = map(self.contents.tensors.__getitem__, map(attrgetter("key"), requests))
        self._read(zip(requests, map(attrgetter("place"), entries), strict=True), progress)

    def _read(self, wanted: Iterable[tuple[Request, Place]], progress: Progress) -> None:
        """Read what is stored at some places."""
        small = [(items.table[2] <= SMALL_BYTES).tolist() for items in self._items]
        coalesced: dict[int, list[tuple[int, Request]]] = defaultdict(list)
        reads = []
        with self._open() as files:
            for request, place in wanted:
                if type(place[0]) is int and request.offsets is None and request.address is not None:
                    rank, number = place
                    if small[rank][number]:
                        coalesced[rank].append((number, request))
                        continue
                for piece in self._pieces_of(request, place):
                    read = partial(self._read_piece, request, piece, files)
                    reads.append(RangeRead(piece.file, piece.offset, piece.length, read))
            for rank, rows in coalesced.items():
                numbers, group = zip(*rows, strict=True)
                column = self.contents.columns[rank]
                is_known = {*column.tensors.names} <= self._known
                checksum = None if is_known else self._checksums.get(column.checksum)
                reads += CoalescedReads(self._items[rank], numbers, group, checksum, files).ranges
            files.read_all(reads, progress, inside=torch.no_grad)  # leaf tensors may be filled

    def _pieces_of(self, request: Request, place: Place) -> Sequence[StoredRange]:
        """The stored parts that overlap the requested one."""
        stored = self.contents.ranges_at(place)
        if len(stored) == 1 and request.offsets is None:
            return stored
        pieces, elements = [], 0
        for piece in stored:
            common = overlap((piece.offsets, piece.shape), request.region)
            if common is not None:
                pieces.append(piece)
                elements += common[2]
        if elements != request.destination.numel():
            raise CheckpointCorruptError(f"The parts of '{request.key}' in {self.where} do not make up the tensor.")
        return pieces

    def _read_piece(self, request: Request, piece: StoredRange, files: FileSet) -> None:
        target, region = request.destination, (piece.offsets, piece.shape)
        direct = request.address is not None and request.region == region
        landing = target if direct else torch.empty(piece.shape, dtype=target.dtype, device="cpu")
        payload = tensor_bytes(landing)
        before = (piece.offset if piece.payload is None else piece.payload) - piece.offset
        after = piece.length - before - payload.nbytes
        self._fill(piece, [memoryview(bytearray(before)), payload, memoryview(bytearray(after))], request.key, files)
        if direct:
            torch.autograd.graph.increment_version(target)
        elif request.region == region:
            copy_into(target, landing, request.key)
        elif (common := overlap(region, request.region)) is not None:
            copy_into(target[common[1]], landing[common[0]], request.key)

    def _fill(self, piece: StoredRange, buffers: Sequence[memoryview], key: str, files: FileSet) -> None:
        """Fill consecutive buffers with a range, and verify it.

        Raises:
            CheckpointCorruptError: the bytes do not match their checksum
            CheckpointUnreadableError: the read failed
        """
        checksum = None if piece.file in self._known else self._checksums.get(piece.checksum_kind)

        def damage() -> str | None:
            found = files.fill_summed(piece.file, buffers, piece.offset, checksum)
            is_whole = found is not None and (checksum is None or found == piece.checksum)
            return None if is_whole else f"'{key}'"

        if damaged := files.verified(piece.file, piece.offset, piece.length, damage):
            raise files.damaged(piece.file, damaged)

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Verify and decode the objects."""
        archives: dict[str, memoryview] = {}
        reads = []
        with self._open() as files:
            for key in keys:
                (piece,) = self.contents.objects[key].place
                data = memoryview(bytearray(piece.length))
                read = partial(self._fill, piece, [data], key, files)
                reads.append(RangeRead(piece.file, piece.offset, piece.length, read))
                archives[f"'{key}' in {os.path.join(self._folder, piece.file)}"] = data
            files.read_all(reads)
        return dict(zip(keys, load_objects(archives), strict=True))


def _refuse(damage: Damage) -> None:
    raise damage.error
