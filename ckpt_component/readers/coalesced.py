"""Small neighbours are read at once: what is done for each of them takes longer than its bytes.

A coalesced read is a range of one file. It is read into a block of memory, compared with the checksums there, where
the processor's cache has it, and one system call scatters the payloads to their tensors. So no tensor is changed by
bytes that are not those that were written.

The checksum of a whole range is known before it is read where it can be combined from those of the items. That takes
one call instead of one for each item, for which the threads would wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from operator import xor
from typing import NamedTuple

import torch

from ..memory.int_columns import column_of, repeated
from ..memory.libc import IOV_BYTES, IOV_MAX, address_of
from ..memory.scratch import BLOCK_BYTES
from ..storage.checksum import Checksum
from .file_set import GAP_BYTES, FileSet
from .rank_index import TensorItems
from .source import Request

#: Larger items are read straight into their tensors.
SMALL_BYTES = 256 << 10
#: So few that the checksums find the bytes in the processor's cache. A range ends with the item that is behind a
#: multiple of this, and fits a block with the rest of its first and last page.
_RANGE_BYTES = 1 << 20
#: One system call fills them all, and what is before each of them.
_MAX_TARGETS = IOV_MAX // 2
_BITS = 32
_ALL = (1 << _BITS) - 1
#: Powers are the product of two from tables, one of so many small ones.
_SMALL = 1 << 11
#: So many pieces at a time. From 32,768 on torch splits each of these hundreds of little operations between threads,
#: which then wait for each other.
_TOGETHER = (1 << 15) - 1


class CoalescedRead(NamedTuple):
    """A range that is read at once.

    Attributes:
        file: its name.
        offset, length: the range of it.
        filled: bytes of it up to the end of the last payload.
        first, last: the targets are those from `first` to before `last`.
        checksum: of the range, if that is known and only zeros are between the items.
    """

    file: str
    offset: int
    length: int
    filled: int
    first: int
    last: int
    checksum: int | None


class ReadTargets:
    """Tensors that small items of one rank fill whole, in the order of the files.

    Args:
        items: of the rank.
        numbers: which of them; at most `SMALL_BYTES` long.
        requests: one for each, with an address; the destination has the payload's size.
        checksum: of the items; None: they are not verified.

    Attributes:
        requests: in the order in which they are read.
        reads: for all of them.
    """

    def __init__(
        self, items: TensorItems, numbers: Sequence[int], requests: Sequence[Request], checksum: Checksum | None
    ) -> None:
        chosen = column_of(numbers)
        order = torch.argsort(items.offset.index_select(0, chosen), stable=True)
        order = order.index_select(
            0, torch.argsort(items.file.index_select(0, chosen.index_select(0, order)), stable=True)
        )
        chosen = chosen.index_select(0, order)
        self.requests = [requests[place] for place in order.tolist()]
        self._destinations = [request.destination for request in self.requests]
        self._checksum = checksum
        self._checksums = [items.checksums[number] for number in chosen.tolist()]
        file, begin, payload, nbytes = (
            column.index_select(0, chosen) for column in (items.file, items.offset, items.payload, items.nbytes)
        )
        end = begin + items.length.index_select(0, chosen)
        gap = begin[1:] - end[:-1]
        # Tied tensors overlap, and are read again.
        cut = (gap < 0) | (gap > GAP_BYTES) | (file[1:] != file[:-1])
        cut |= begin[1:] // _RANGE_BYTES != begin[:-1] // _RANGE_BYTES
        cut[_MAX_TARGETS - 1 :: _MAX_TARGETS] = True
        first = torch.cat([torch.zeros(1, dtype=torch.int64), cut.nonzero().flatten() + 1])
        last = torch.cat([first[1:], torch.tensor([len(begin)])])
        offset = begin.index_select(0, first)
        start = repeated(offset, last - first)
        #: Of each item, in its range.
        self._bounds = (begin - start).tolist(), (end - start).tolist()
        # The system call fills pieces of memory one after the other: what is between two payloads goes nowhere.
        behind = payload + nbytes
        before = torch.cat([torch.zeros(1, dtype=torch.int64), behind[:-1]]).index_copy_(0, first, offset)
        self._nowhere = bytearray(BLOCK_BYTES)
        nowhere = torch.full_like(payload, address_of(memoryview(self._nowhere)))
        addresses = column_of([request.address or 0 for request in self.requests])
        self._table = torch.stack([nowhere, payload - before, addresses, nbytes], dim=1)
        names = map(items.names.__getitem__, file.index_select(0, first).tolist())
        columns = (
            offset,
            end.index_select(0, last - 1) - offset,
            behind.index_select(0, last - 1) - offset,
            first,
            last,
        )
        sums = self._checksums_of_ranges(begin, end, first, last)
        self.reads = list(map(CoalescedRead, names, *map(torch.Tensor.tolist, columns), sums))

    def _checksums_of_ranges(
        self, begin: torch.Tensor, end: torch.Tensor, first: torch.Tensor, last: torch.Tensor
    ) -> Sequence[int | None]:
        """What each range should have, with zeros between its items, as our writers leave them; None: not known."""
        polynomial = None if self._checksum is None else self._checksum.polynomial
        if polynomial is None or min(self._checksums) < 0 or max(self._checksums) >= 1 << 32:
            return [None] * len(first)
        return combined_crcs(polynomial, column_of(self._checksums), begin, end, first, last)

    def fill(self, read: CoalescedRead, files: FileSet) -> Request | None:
        """Fill the tensors of one range.

        Returns:
            None, or the first request whose bytes are not those that were written; then nothing is filled.

        Raises:
            CheckpointUnreadableError: the read fails.
        """
        name, offset, length, filled, first, last, expected = read
        mine = slice(first, last)
        with files.scratch.block() as block:
            start = files.fill_block(name, block.view, offset, length)
            if start is None:
                return self.requests[last - 1]
            with block.view[start : start + length] as view:
                if self._checksum is not None and (expected is None or self._checksum.of(view) != expected):
                    columns = (self.requests, *self._bounds, self._checksums)
                    for request, begin, end, checksum in zip(*(column[mine] for column in columns), strict=True):
                        if self._checksum.of(view[begin:end]) != checksum:
                            return request
            block.scatter(self._table.data_ptr() + first * 2 * IOV_BYTES, 2 * (last - first), filled, start)
        # The memory was written without autograd's knowledge, and others may watch the version.
        torch.autograd.graph.increment_version(self._destinations[mine])
        return None


def combined_crcs(
    polynomial: int,
    crcs: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
) -> list[int]:
    """The CRC of each range, in which pieces follow each other with nothing but zeros between them.

    A CRC is a remainder of polynomials over bits. To append n bytes multiplies what was before by x^(8n), and adds the
    remainder of the bytes, as in zlib's `crc32_combine`. Here for many ranges at once, column by column, in 32 bits
    with a sign. The lowest power of x is the highest bit, as in zlib's numbers.

    Args:
        polynomial: of the CRC, without its highest power.
        crcs: of all pieces, int64.
        begin: where each piece begins, in bytes, int64; a range has less than 2^31.
        end: where it ends.
        first: each range's first piece. The range begins where that does.
        last: the piece behind its last, with whose end the range ends.
    """
    # A register begins with all bits set and is inverted at the end; zeros multiply it, and add nothing. So a piece
    # adds its CRC without that, and takes back what the register that it began with has become at the range's end.
    finish = repeated(end.index_select(0, last - 1), last - first)
    columns = (crcs ^ _ALL, finish - end, finish - begin)
    added: list[int] = []
    taken: list[int] = []
    for some, behind, whole in zip(*(column.split(_TOGETHER) for column in columns), strict=True):
        added += _multiply(some.to(torch.int32), _powers(behind, polynomial), polynomial).tolist()
        taken += _powers(whole, polynomial).tolist()
    ranges = list(zip(first.tolist(), last.tolist(), strict=True))
    # The range's own register began with the first piece's.
    registers = column_of([reduce(xor, taken[low + 1 : high], 0) for low, high in ranges]).to(torch.int32)
    changes = _multiply(torch.full_like(registers, -1), registers, polynomial).tolist()
    return [
        (reduce(xor, added[low:high]) ^ change ^ _ALL) & _ALL
        for (low, high), change in zip(ranges, changes, strict=True)
    ]


def _powers(lengths: torch.Tensor, polynomial: int) -> torch.Tensor:
    """x^(8n)."""
    highest = int(lengths.max()) // _SMALL
    small, large = _table(polynomial, 1, _SMALL), _table(polynomial, _SMALL, 1 << max(highest, 1).bit_length())
    return _multiply(small.index_select(0, lengths % _SMALL), large.index_select(0, lengths // _SMALL), polynomial)


@cache
def _table(polynomial: int, step: int, count: int) -> torch.Tensor:
    """x^(8 step k) for k from 0 to before `count`, a power of two. Doubled, and doubled again."""
    power = torch.tensor([1 << _BITS - 9], dtype=torch.int32)
    for _ in range(step.bit_length() - 1):
        power = _multiply(power, power, polynomial)
    table = torch.tensor([-1 << _BITS - 1], dtype=torch.int32)  # 1
    while len(table) < count:
        table = torch.cat([table, _multiply(table, power.expand(len(table)), polynomial)])
        power = _multiply(power, power, polynomial)
    return table


def _multiply(one: torch.Tensor, other: torch.Tensor, polynomial: int) -> torch.Tensor:
    """The product of columns, int32: from the highest power of `one` to the lowest, each time by x."""
    overflow = polynomial - (1 << _BITS) if polynomial >> _BITS - 1 else polynomial
    product = torch.zeros_like(one)
    for bit in range(_BITS):
        carry = (product & 1) * overflow
        product >>= 1
        product &= _ALL >> 1  # the sign moved with it
        product ^= carry
        product ^= (one >> bit & 1) * other
    return product
