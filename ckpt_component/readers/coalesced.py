"""Small neighbours are read at once: what is done for each of them takes longer than its bytes.

A coalesced read is a range of one file. It is read into a block of memory, compared with the checksums there, where
the processor's cache has it, and one system call scatters the payloads to their tensors. So no tensor is changed by
bytes that are not those that were written.

The checksum of a whole range is known before it is read where it can be combined from those of the items. That takes
one call instead of one for each item, for which the threads would wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..memory.int_columns import column_of, picked, repeated, where
from ..memory.libc import IOV_BYTES, IOV_MAX, address_of
from ..memory.scratch import BLOCK_BYTES
from ..storage.checksum import Checksum
from .crc import combined_crcs
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
        order = torch.argsort(picked(items.offset, chosen), stable=True)
        order = picked(order, torch.argsort(picked(items.file, picked(chosen, order)), stable=True))
        chosen = picked(chosen, order)
        self.requests = [requests[place] for place in order.tolist()]
        self._destinations = [request.destination for request in self.requests]
        self._checksum = checksum
        self._checksums = [items.checksums[number] for number in chosen.tolist()]
        file, begin, payload, nbytes = (
            picked(column, chosen) for column in (items.file, items.offset, items.payload, items.nbytes)
        )
        end = begin + picked(items.length, chosen)
        gap = begin[1:] - end[:-1]
        # Tied tensors overlap, and are read again.
        cut = (gap < 0) | (gap > GAP_BYTES) | (file[1:] != file[:-1])
        cut |= begin[1:] // _RANGE_BYTES != begin[:-1] // _RANGE_BYTES
        cut[_MAX_TARGETS - 1 :: _MAX_TARGETS] = True
        first = torch.cat([torch.zeros(1, dtype=torch.int64), where(cut) + 1])
        last = torch.cat([first[1:], torch.tensor([len(begin)])])
        offset = picked(begin, first)
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
        names = map(items.names.__getitem__, picked(file, first).tolist())
        columns = (offset, picked(end, last - 1) - offset, picked(behind, last - 1) - offset, first, last)
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
