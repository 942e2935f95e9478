"""Checkpoints whose index locates every payload: ours, and safetensors files. Every item is verified as it is read."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property, partial, reduce
from operator import attrgetter, xor
from typing import Any, NamedTuple

import torch

from ..core.libc import IOV_BYTES, IOV_MAX
from ..core.pages import BLOCK_BYTES
from ..core.progress import Progress, no_progress
from ..core.storage.checksum import Checksum
from ..core.storage.file_set import GAP_BYTES, FileSet, RangeRead
from ..errors import CheckpointCorruptError
from ..state.coverage import overlap
from ..state.tensors import column_of, tensor_bytes
from .foreign import load_objects
from .index import Contents, Index, Place
from .rank_index import ItemColumns, StoredRange, checksum_of
from .source import Access, Request, Source, copy_into
from .verification import Damage, verify_open_items


class TensorItems:
    """The tensor items of one rank.

    Args:
        columns: the items
    """

    def __init__(self, columns: ItemColumns) -> None:
        self.columns = columns

    @cached_property
    def table(self) -> torch.Tensor:
        """int64, one column per item; its rows are the file's number, offset, length, payload and nbytes."""
        columns = self.columns
        rows = (columns.files, columns.offsets, columns.lengths, columns.payloads, columns.nbytes)
        numbers = [number for row in rows for number in row]
        return column_of(numbers).view(len(rows), len(columns.offsets))


#: Larger items are read straight into their tensors.
SMALL_BYTES = 256 << 10
#: Small enough that the bytes are still in the processor's cache for the checksums. A range ends with the last item
#: that begins before a multiple of this, and fits a block together with its first and last page.
_RANGE_BYTES = 1 << 20
#: One system call fills them all, with a gap before each.
_MAX_TARGETS = IOV_MAX // 2
#: From so many items on, it is faster to combine their checksums to those of ranges (some 5 ms) than to take each.
MANY_ITEMS = 1024


class _ReadSpan(NamedTuple):
    """A range of a file that is read at once.

    Attributes:
        name: name of the file
        offset: start of the range in the file
        length: length of the range
        filled: bytes of the range up to the end of the last payload
        first: number of its first tensor
        last: number of its last tensor, plus one
        expected: checksum of the range where only zeros separate its items, as our writers leave them; None: unknown
    """

    name: str
    offset: int
    length: int
    filled: int
    first: int
    last: int
    expected: int | None


class CoalescedReads:
    """Reads that fill tensors whole from small items of one rank.

    Args:
        items: the rank's items
        numbers: numbers of the items to read, each at most `SMALL_BYTES` long
        requests: one for each item, with an address; the destination has the payload's size
        checksum: the items' checksum algorithm; None: they are not verified
        files: the files that contain the items

    Attributes:
        ranges: the ranges that cover all items. They must be read while this object is alive.
    """

    def __init__(
        self,
        items: TensorItems,
        numbers: Sequence[int],
        requests: Sequence[Request],
        checksum: Checksum | None,
        files: FileSet,
    ) -> None:
        file, offset = items.table.index_select(1, column_of(numbers))[:2]
        order = torch.argsort(offset, stable=True)
        order = order.index_select(0, torch.argsort(file.index_select(0, order), stable=True))
        self._files = files
        self._checksum = checksum
        self._requests = list(map(requests.__getitem__, order.tolist()))
        self._destinations = list(map(attrgetter("destination"), self._requests))
        selected = list(map(numbers.__getitem__, order.tolist()))
        self._sums = list(map(items.columns.checksums.__getitem__, selected))
        file, begin, length, payload, nbytes = items.table.index_select(1, column_of(selected))
        end, payload_end = begin + length, payload + nbytes
        self._bounds = list(zip(begin.tolist(), end.tolist(), strict=True))
        gap = begin[1:] - end[:-1]
        # Tied tensors overlap and are read more than once.
        cut = (gap < 0) | (gap > GAP_BYTES) | (file[1:] != file[:-1])
        cut |= begin[1:] // _RANGE_BYTES != begin[:-1] // _RANGE_BYTES
        cut[_MAX_TARGETS - 1 :: _MAX_TARGETS] = True
        zero = column_of([0])
        first = torch.cat([zero, cut.nonzero().flatten() + 1])
        last = torch.cat([first[1:] - 1, column_of([len(begin) - 1])])
        offset = begin.index_select(0, first)
        # The system call fills pieces of memory in order; bytes between two payloads go to a discard buffer.
        before = torch.cat([zero, payload_end[:-1]]).index_copy_(0, first, offset)
        self._discard = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu")
        discard = torch.full_like(payload, self._discard.data_ptr())
        addresses = column_of(map(attrgetter("address"), self._requests))
        self._table = torch.stack([discard, payload - before, addresses, nbytes], dim=1)
        names = map(items.columns.names.__getitem__, file.index_select(0, first).tolist())
        lengths = end.index_select(0, last) - offset
        filled = payload_end.index_select(0, last) - offset
        columns = (column.tolist() for column in (offset, lengths, filled, first, last + 1))
        expected: Sequence[int | None] = [None] * len(first)
        combines = checksum is not None and checksum.name in POLYNOMIALS and len(self._sums) >= MANY_ITEMS
        if checksum is not None and combines and fits(self._sums):
            expected = combined_crcs(POLYNOMIALS[checksum.name], column_of(self._sums), begin, end, first, last)
        self.ranges = [
            RangeRead(each.name, each.offset, each.length, partial(self._fill, each))
            for each in map(_ReadSpan, names, *columns, expected)
        ]

    def _fill(self, span: _ReadSpan) -> None:
        """Read a range and fill its tensors.

        Raises:
            CheckpointCorruptError: the bytes do not match their checksums; no tensor of the range is changed
            CheckpointUnreadableError: the read failed
        """
        name, offset, length, filled, first, last, expected = span
        block, start = self._files.block, 0

        def damage() -> str | None:
            nonlocal start
            filled_from = self._files.fill_block(name, offset, length)
            if filled_from is None:
                return f"'{self._requests[last - 1].key}'"
            start = filled_from
            if self._checksum is None:
                return None
            with block.view[start : start + length] as view:
                if expected is not None and self._checksum.of(view) == expected:
                    return None
                for (begin, end), checksum, request in zip(
                    self._bounds[first:last], self._sums[first:last], self._requests[first:last], strict=True
                ):
                    if self._checksum.of(view[begin - offset : end - offset]) != checksum:
                        return f"'{request.key}'"
            return None

        if damaged := self._files.verified(name, offset, length, damage):
            raise self._files.damaged(name, damaged)
        block.scatter(self._table.data_ptr() + first * 2 * IOV_BYTES, 2 * (last - first), filled, start)
        # Autograd did not see the write; code that checks tensor versions must.
        torch.autograd.graph.increment_version(self._destinations[first:last])


# Combine the CRCs of items into the CRC of a range of a file, which one call then verifies. Verifying the items of a
# range one by one takes longer than their bytes, because every call releases the GIL and the reading threads wait for
# each other.
#
# A CRC is a remainder of polynomials over bits. Appending n bytes multiplies the remainder by x^(8n) and adds that of
# the new bytes, as in zlib's `crc32_combine`. This is done for many ranges at once, column by column, in signed 32-bit
# integers. The highest bit is the lowest power of x, as in zlib's numbers.

#: By checksum: its polynomial, without the highest power.
POLYNOMIALS: Mapping[str, int] = {"crc32": 0xEDB88320, "crc32c": 0x82F63B78}
_BITS = 32
_ALL = (1 << _BITS) - 1
#: Powers are products of two table entries; this is the size of the table of small powers.
_SMALL = 1 << 11
#: Numbers per operation. From 32,768 on, torch splits each of these hundreds of small operations between threads.
_BATCH = (1 << 15) - 1


def combined_crcs(
    polynomial: int,
    crcs: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
) -> list[int]:
    """The CRC of each range, whose items are separated by nothing but zeros.

    Args:
        polynomial: the CRC's polynomial, without its highest power
        crcs: the CRCs of all items, int64
        begin: where each item begins, in bytes, int64; a range is shorter than 2^31
        end: where it ends
        first: the first item of each range, which begins with it
        last: the last item of each range, which ends with it
    """
    # A register starts with all bits set and is inverted at the end; zeros multiply it and add nothing. So an item adds
    # its inverted CRC, and removes what its own initial register has become at the end of the range.
    counts = last + 1 - first
    finish = end.index_select(0, last).repeat_interleave(counts)
    columns = (crcs ^ _ALL, finish - end, finish - begin)
    added: list[int] = []
    removed: list[int] = []
    for some, after, whole in zip(*(column.split(_BATCH) for column in columns), strict=True):
        added += _multiply(some.to(torch.int32), _powers(after, polynomial), polynomial).tolist()
        removed += _powers(whole, polynomial).tolist()
    ranges = list(zip(first.tolist(), (last + 1).tolist(), strict=True))
    # The initial register of the first item is that of the range.
    registers = column_of([reduce(xor, removed[low + 1 : high], 0) for low, high in ranges]).to(torch.int32)
    changes = _multiply(torch.full_like(registers, -1), registers, polynomial).tolist()
    return [
        (reduce(xor, added[low:high]) ^ change ^ _ALL) & _ALL
        for (low, high), change in zip(ranges, changes, strict=True)
    ]


def fits(checksums: Sequence[int]) -> bool:
    """Whether all numbers can be CRCs."""
    return min(checksums) >= 0 and max(checksums) <= _ALL


def _powers(lengths: torch.Tensor, polynomial: int) -> torch.Tensor:
    """x^(8n) for each length n."""
    highest = int(lengths.max()) // _SMALL
    small, large = _table(polynomial, 1, _SMALL), _table(polynomial, _SMALL, 1 << max(highest, 1).bit_length())
    return _multiply(small.index_select(0, lengths % _SMALL), large.index_select(0, lengths // _SMALL), polynomial)


@cache
def _table(polynomial: int, step: int, count: int) -> torch.Tensor:
    """x^(8 * step * k) for all k below `count`, a power of two. The table is doubled until it is complete."""
    power = torch.tensor([1 << _BITS - 9], dtype=torch.int32, device="cpu")
    for _ in range(step.bit_length() - 1):
        power = _multiply(power, power, polynomial)
    table = torch.tensor([-1 << _BITS - 1], dtype=torch.int32, device="cpu")  # 1
    while len(table) < count:
        table = torch.cat([table, _multiply(table, power.expand(len(table)), polynomial)])
        power = _multiply(power, power, polynomial)
    return table


def _multiply(one: torch.Tensor, other: torch.Tensor, polynomial: int) -> torch.Tensor:
    """The products of two int32 columns: Horner's method, from the highest power of `one` to the lowest."""
    overflow = polynomial - (1 << _BITS) if polynomial >> _BITS - 1 else polynomial
    product = torch.zeros_like(one)
    for bit in range(_BITS):
        carry = (product & 1) * overflow
        product >>= 1
        product &= _ALL >> 1  # the shift copied the sign
        product ^= carry
        product ^= (one >> bit & 1) * other
    return product


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
