"""Small neighbours are read at once: what is done for each of them takes longer than its bytes.

A coalesced read is a range of one file. It is read into a block of memory, compared with the checksums there, where
the processor's cache has it, and one system call scatters the payloads to their tensors. So no tensor is changed by
bytes that are not those that were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter

import torch

from ..memory.int_columns import column_of
from ..memory.libc import IOV_BYTES, IOV_MAX
from ..memory.scratch import BLOCK_BYTES
from ..storage.checksum import Checksum
from .file_set import GAP_BYTES, FileSet, RangeRead
from .rank_index import TensorItems
from .source import Request

#: Larger items are read straight into their tensors.
SMALL_BYTES = 256 << 10
#: So few that the checksums find the bytes in the processor's cache. A range ends with the item that is behind a
#: multiple of this, and fits a block with the rest of its first and last page.
_RANGE_BYTES = 1 << 20
#: One system call fills them all, and what is before each of them.
_MAX_TARGETS = IOV_MAX // 2


class CoalescedReads:
    """Reads that fill tensors whole from small items of one rank.

    Args:
        items: of the rank.
        numbers: which of them; at most `SMALL_BYTES` long.
        requests: one for each, with an address; the destination has the payload's size.
        checksum: of the items; None: they are not verified.
        files: that the items are in.

    Attributes:
        ranges: for all of them, to be read while this object is there.
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
        chosen = list(map(numbers.__getitem__, order.tolist()))
        self._sums = list(map(items.checksums.__getitem__, chosen))
        file, begin, length, payload, nbytes = items.table.index_select(1, column_of(chosen))
        end, payload_end = begin + length, payload + nbytes
        self._bounds = list(zip(begin.tolist(), end.tolist(), strict=True))
        gap = begin[1:] - end[:-1]
        # Tied tensors overlap, and are read again.
        cut = (gap < 0) | (gap > GAP_BYTES) | (file[1:] != file[:-1])
        cut |= begin[1:] // _RANGE_BYTES != begin[:-1] // _RANGE_BYTES
        cut[_MAX_TARGETS - 1 :: _MAX_TARGETS] = True
        first = torch.cat([torch.zeros(1, dtype=torch.int64), cut.nonzero().flatten() + 1])
        last = torch.cat([first[1:] - 1, torch.tensor([len(begin) - 1])])
        offset = begin.index_select(0, first)
        # The system call fills pieces of memory one after the other: what is between two payloads goes nowhere.
        before = torch.cat([torch.zeros(1, dtype=torch.int64), payload_end[:-1]]).index_copy_(0, first, offset)
        self._nowhere = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        nowhere = torch.full_like(payload, self._nowhere.data_ptr())
        addresses = column_of(map(attrgetter("address"), self._requests))
        self._table = torch.stack([nowhere, payload - before, addresses, nbytes], dim=1)
        names = map(items.names.__getitem__, file.index_select(0, first).tolist())
        lengths = end.index_select(0, last) - offset
        filled = payload_end.index_select(0, last) - offset
        columns = (column.tolist() for column in (offset, lengths, filled, first, last + 1))
        self.ranges = [
            RangeRead(name, offset, length, partial(self._fill, name, offset, length, *rest))
            for name, offset, length, *rest in zip(names, *columns, strict=True)
        ]

    def _fill(self, name: str, offset: int, length: int, filled: int, first: int, last: int) -> None:
        """Read a range and fill its tensors.

        Args:
            name: of the file.
            offset: in the file.
            length: of the range.
            filled: bytes of it up to the end of the last payload.
            first: its first tensor.
            last: the one behind its last.

        Raises:
            CheckpointCorruptError: the bytes are not those that were written; no tensor of the range is changed then.
            CheckpointUnreadableError: the read fails.
        """
        block = self._files.block
        start = self._files.fill_block(name, offset, length)
        if start is None:
            raise self._files.damaged(name, f"'{self._requests[last - 1].key}'")
        if self._checksum is not None:
            with block.view[start : start + length] as view:
                for (begin, end), checksum, request in zip(
                    self._bounds[first:last], self._sums[first:last], self._requests[first:last], strict=True
                ):
                    if self._checksum.of(view[begin - offset : end - offset]) != checksum:
                        raise self._files.damaged(name, f"'{request.key}'")
        block.scatter(self._table.data_ptr() + first * 2 * IOV_BYTES, 2 * (last - first), filled, start)
        # The memory was written without autograd's knowledge, and others may watch the version.
        torch.autograd.graph.increment_version(self._destinations[first:last])
