"""Many small neighbours are read at once: what is done for each of them takes longer than its bytes.

A run is a range of one file. It is read into a block of memory, compared with the checksums there, where the
processor's cache has it, and one system call spreads the payloads to their tensors. So no tensor is touched by bytes
that are not those that were written.

The checksum of a whole run is known before it is read where it can be put together from those of the items. That takes
one call instead of one for each item, for which the threads would wait for each other (a third of the time of 20,000
tensors with two threads).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..memory.huge_pages import address_of
from ..memory.int_columns import column_of, picked, repeated, where
from ..memory.scratch import Block
from ..storage.checksum import Checksum
from ..storage.fs import MAX_BUFFERS
from .crc import CrcOfRanges
from .direct_io import PAGE
from .items import TensorItems
from .ranges import OpenFiles

#: Larger items are read straight into their tensors.
SMALL_BYTES = 256 << 10
#: So few that the checksums find the bytes in the processor's cache.
_RUN_BYTES = 1 << 20
#: Bytes that nobody asked for, such as other items, are rather read along than jumped over up to this gap.
_GAP_BYTES = 32 << 10
#: One system call fills them all, and what is before each of them.
_MOST_LANDINGS = MAX_BUFFERS // 2
_LANDING_BYTES = 32  # of two pieces: address and length of each
#: A run ends with the item that is behind a multiple of _RUN_BYTES.
_MOST_BYTES = _RUN_BYTES + SMALL_BYTES
#: With the rest of the first and of the last page, for reads of whole pages.
BLOCK_BYTES = _MOST_BYTES + 2 * PAGE


class Landings:
    """Small items of one rank and the tensors that each of them fills whole, in the order of the files.

    Args:
        items: of the rank.
        numbers: which of them; at most `SMALL_BYTES` long.
        targets: one for each: plain, with the payload's size. They are kept alive.
        addresses: where the memory of each begins.
        checksum: of the items; None: they are not verified.
    """

    def __init__(
        self,
        items: TensorItems,
        numbers: torch.Tensor,
        targets: Sequence[torch.Tensor],
        addresses: torch.Tensor,
        checksum: Checksum | None,
    ) -> None:
        order = torch.argsort(picked(items.offset, numbers), stable=True)
        order = picked(order, torch.argsort(picked(items.file, picked(numbers, order)), stable=True))
        chosen = picked(numbers, order)
        self.checksum = checksum
        #: Of each landing, its place in `targets`.
        self.order: list[int] = order.tolist()
        self.targets = [targets[place] for place in self.order]
        self._addresses = picked(addresses, order)
        self._names = items.names
        self._file, self._offset = picked(items.file, chosen), picked(items.offset, chosen)
        self._end = self._offset + picked(items.length, chosen)
        self.checksums = [items.checksums[number] for number in chosen.tolist()]
        self._payload, self._nbytes = picked(items.payload, chosen), picked(items.nbytes, chosen)

    def runs(self) -> Iterator[Run]:
        """All landings, in runs of neighbours."""
        file, offset, end = self._file, self._offset, self._end
        gap = offset[1:] - end[:-1]
        # What is tied overlaps, and is read again.
        cut = (gap < 0) | (gap > _GAP_BYTES) | (file[1:] != file[:-1])
        cut |= offset[1:] // _RUN_BYTES != offset[:-1] // _RUN_BYTES
        cut[_MOST_LANDINGS - 1 :: _MOST_LANDINGS] = True
        first = torch.cat([torch.zeros(1, dtype=torch.int64), where(cut) + 1])
        last = torch.cat([first[1:], torch.tensor([len(offset)])])
        starting = picked(offset, first)
        start = repeated(starting, last - first)
        # The system call fills pieces of memory one after the other: what is between two payloads lands nowhere.
        behind = self._payload + self._nbytes
        before = torch.cat([torch.zeros(1, dtype=torch.int64), behind[:-1]])
        before.index_copy_(0, first, starting)
        nowhere = bytearray(_MOST_BYTES)
        pieces = torch.empty(len(offset), 4, dtype=torch.int64)
        pieces[:, 0] = address_of(memoryview(nowhere))
        pieces[:, 1] = self._payload - before
        pieces[:, 2] = self._addresses
        pieces[:, 3] = self._nbytes
        table = Table(pieces, nowhere)
        wholes = self._checksums_of_runs(first, last)
        bounds = (offset - start).tolist(), (end - start).tolist()
        lengths, filled = picked(end, last - 1) - starting, picked(behind, last - 1) - starting
        columns = (picked(file, first), starting, lengths, filled, first, last)
        rows = zip(*(each.tolist() for each in columns), wholes, strict=True)
        for number, place, length, fill, low, high, whole in rows:
            yield Run(self, self._names[number], place, length, fill, low, high, bounds, whole, table)

    def _checksums_of_runs(self, first: torch.Tensor, last: torch.Tensor) -> Sequence[int | None]:
        """What each run should have, with zeros between its items, as our writers leave them; None: not known."""
        polynomial = None if self.checksum is None else self.checksum.polynomial
        if polynomial is None or min(self.checksums) < 0 or max(self.checksums) >= 1 << 32:
            return [None] * len(first)
        return CrcOfRanges(polynomial).combined(column_of(self.checksums), self._offset, self._end, first, last)


class Table:
    """For each landing, where the bytes before its payload go (nowhere) and how many they are, and the same of those.

    Args:
        pieces: a row for each landing: address, length, address, length.
        nowhere: what the first addresses mean.
    """

    def __init__(self, pieces: torch.Tensor, nowhere: bytearray) -> None:
        self.address = pieces.data_ptr()
        self._memory = pieces, nowhere  # system calls write there, so it must stay


@dataclass(frozen=True)
class Run:
    """Landings that are read at once.

    Attributes:
        landings: whose.
        name: the file.
        offset, length: the range of it.
        filled: bytes of it up to the end of the last payload.
        first, last: the landings are those from `first` to before `last`.
        bounds: where each item of all runs begins in its run's range, and where it ends there.
        whole: the checksum of the range, if that is known and only zeros are between the items.
        table: where the bytes of all runs go.
    """

    landings: Landings
    name: str
    offset: int
    length: int
    filled: int
    first: int
    last: int
    bounds: tuple[list[int], list[int]]
    whole: int | None
    table: Table

    def read(self, files: OpenFiles, block: Block) -> int | None:
        """Fill the tensors.

        Returns:
            None, or the number of the first landing whose bytes are not those that were written; nothing is filled.

        Raises:
            CheckpointUnreadableError: the read fails.
        """
        begin = files.fill_block(self.name, block.view, self.offset, self.length)
        if begin is None:
            return self.last - 1
        with block.view[begin : begin + self.length] as view:
            checksum = self.landings.checksum
            if checksum is not None and (self.whole is None or checksum.of(view) != self.whole):
                taken, mine = checksum.of, slice(self.first, self.last)
                columns = (*self.bounds, self.landings.checksums)
                for place, (start, end, wanted) in enumerate(zip(*(column[mine] for column in columns), strict=True)):
                    if taken(view[start:end]) != wanted:
                        return self.first + place
        rows = self.table.address + self.first * _LANDING_BYTES
        block.spread(rows, 2 * (self.last - self.first), self.filled, begin)
        # The memory was written behind autograd's back, and others may watch the version.
        torch.autograd.graph.increment_version(self.landings.targets[self.first : self.last])
        return None
