"""Parallel writers: each takes its ranges of the image, block by block, writes them, and computes checksums.

With direct I/O whole pages are written past the page cache: durable sooner, and nothing that training has in the cache
is pushed out. A range that begins or ends inside a page is widened to whole pages; the neighbour writes the same bytes
there, because both lie in the same image.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..memory.huge_pages import align, align_down
from ..storage.checksum import Checksum, Stream

if TYPE_CHECKING:
    from .request import WriteRequest

#: So much is still in the core's own cache (2 MB) when its checksum is taken right after it was copied.
_CACHED_BYTES = 512 << 10


class ByteSource(Protocol):
    """Where the bytes of an image come from: an arena, or the live tensors."""

    @property
    def nbytes(self) -> int:
        """Of the image."""
        ...

    def buffers(self, start: int, end: int, *, whole: bool = False) -> list[memoryview]:
        """The bytes [start, end) of the image as one or more pieces, in order.

        They are there until the same thread has asked for the range after the next.

        Args:
            start: a page boundary, if `whole`.
            end: may be behind the image's, in its last page.
            whole: as one piece that begins at a page boundary of memory.
        """
        ...


@dataclass(frozen=True)
class Lane:
    """What one parallel writer does: bytes [start, end) of a file, and the items that lie in there.

    Attributes:
        file: number in the table.
        start: of the bytes.
        end: of the bytes.
        first: the number of the first item among all items.
        places: of `places_of` the items.
    """

    file: int
    start: int
    end: int
    first: int
    places: memoryview


def places_of(items: Iterable[tuple[int, int]]) -> memoryview:
    """Offsets and lengths of items in a file, ascending, side by side: pairs would take ten times the memory.

    Args:
        items: offset and length of each.

    Returns:
        64-bit numbers.
    """
    return memoryview(array("Q", itertools.chain.from_iterable(items)))


class Throttle:
    """Keeps all lanes together below a rate.

    Args:
        bytes_per_second: None: no limit.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def wait(self, nbytes: int) -> None:
        """Return when so many more bytes may be written."""
        if self._rate is None:
            return
        with self._lock:
            start = max(self._free_at, time.monotonic())
            self._free_at = start + nbytes / self._rate
        time.sleep(max(start - time.monotonic(), 0))


class LaneWriter:
    """Writes the lanes of one request.

    Args:
        request: which bytes go where, and how.
        descriptors: of the table's files, by number.
        checksum: of the items.
        sums: by number of the item; filled in.
        direct: whether the descriptors bypass the page cache.
        in_memory: whether the files are kept in memory alone, so that a write is a copy and nothing else.
    """

    def __init__(
        self,
        request: WriteRequest,
        descriptors: Sequence[int],
        checksum: Checksum,
        sums: list[int],
        *,
        direct: bool,
        in_memory: bool,
    ) -> None:
        self._fs = request.fs
        self._source = request.source
        self._table = request.table
        self._descriptors = descriptors
        self._checksum = checksum
        self._sums = sums
        self._direct = direct
        self._in_memory = in_memory
        self._block_bytes = align(request.options.block_bytes)
        self._throttle = Throttle(request.options.max_bytes_per_second)
        self._failed: list[BaseException] = []

    def run(self) -> None:
        """Write all lanes, a group after its own order and the groups at once.

        Raises:
            OSError: the first failure; the others have stopped at their next block.
        """
        groups = [lanes for lanes in self._table.lanes if lanes]
        # Where no device is waited for, a thread beside takes the processor of one that copies, if there are so few.
        alone = self._in_memory and len(os.sched_getaffinity(0)) < 2 * len(groups)
        with ThreadPoolExecutor(max(len(groups), 1), thread_name_prefix="ckpt-write") as pool:
            for lanes in groups:
                pool.submit(self._run_group, lanes, alone)
        if self._failed:
            raise self._failed[0]

    def _run_group(self, lanes: Sequence[Lane], alone: bool) -> None:
        try:
            # One thread beside the one that writes, because disk, checksum (zlib: 2 GB/s) and the gathering of live
            # tensors each take about as long as the other.
            with ThreadPoolExecutor(1, thread_name_prefix="ckpt-sum") as beside:
                for lane in lanes:
                    if alone:
                        self._write_alone(lane)
                    else:
                        self._write(lane, beside)
        except BaseException as error:
            self._failed.append(error)

    def _ranges(self, lane: Lane, nbytes: int) -> list[tuple[int, int]]:
        """What one write call after the other takes of a lane's file."""
        start, stop = lane.start, lane.end
        if self._direct:
            start, stop = align_down(start), align(stop)
        return [(at, min(at + nbytes, stop)) for at in range(start, stop, nbytes)]

    def _pieces(self, lane: Lane, start: int, end: int) -> list[memoryview]:
        """The bytes of a range of a lane's file."""
        base = self._table.files[lane.file].base
        return self._source.buffers(base + start, base + end, whole=self._direct)

    def _write_alone(self, lane: Lane) -> None:
        """In one thread, which sums what is still in its cache: on two processors 1.2 times as fast as with another."""
        descriptor, cursor = self._descriptors[lane.file], SumCursor(lane, self._checksum, self._sums)
        for position, end in self._ranges(lane, min(self._block_bytes, _CACHED_BYTES)):
            if self._failed:
                return
            pieces = self._pieces(lane, position, end)
            self._throttle.wait(end - position)
            self._fs.write(descriptor, pieces, position)
            cursor.feed(_within(pieces, position, lane.start, lane.end))

    def _write(self, lane: Lane, beside: ThreadPoolExecutor) -> None:
        descriptor, cursor = self._descriptors[lane.file], SumCursor(lane, self._checksum, self._sums)
        ranges = self._ranges(lane, self._block_bytes)
        next_pieces = beside.submit(self._pieces, lane, *ranges[0]) if ranges else None
        last_sum: Future[None] | None = None
        for number, (position, end) in enumerate(ranges, 1):
            if self._failed or next_pieces is None:
                return
            pieces = next_pieces.result()
            if last_sum is not None:
                last_sum.result()  # it came before this fetch; a failure ends the lane here
            # From the image and not from the file, so that it also covers the write. In order, behind the last block's.
            last_sum = beside.submit(cursor.feed, _within(pieces, position, lane.start, lane.end))
            next_pieces = beside.submit(self._pieces, lane, *ranges[number]) if number < len(ranges) else None
            self._throttle.wait(end - position)
            self._fs.write(descriptor, pieces, position)
            if not self._direct:
                self._fs.start_writeback(descriptor, position, end - position)
        if last_sum is not None:
            last_sum.result()


class SumCursor:
    """Takes the bytes of a lane in order and notes one checksum per item; bytes between items are skipped."""

    def __init__(self, lane: Lane, checksum: Checksum, sums: list[int]) -> None:
        self._places = lane.places
        self._number = lane.first
        self._last = lane.first + len(lane.places) // 2
        self._first = lane.first
        self._position = lane.start
        self._checksum = checksum
        self._sums = sums
        #: Of the item that the last piece ended in.
        self._begun: Stream | None = None

    def feed(self, pieces: Sequence[memoryview]) -> None:
        """Take the next bytes."""
        for piece in pieces:
            self._feed(piece)

    def _feed(self, piece: memoryview) -> None:
        start = self._position
        stop = start + piece.nbytes
        self._position = stop
        number, places, sums, first, of = self._number, self._places, self._sums, self._first, self._checksum.of
        while number < self._last:
            place = 2 * (number - first)
            offset = places[place]
            end = offset + places[place + 1]
            if offset >= start and end <= stop:
                sums[number] = of(piece[offset - start : end - start])
            elif offset >= stop:
                break
            else:
                begun = self._begun = self._begun or self._checksum.stream()
                begun.update(piece[max(offset, start) - start : min(end, stop) - start])
                if end > stop:
                    break
                sums[number] = begun.value()
                self._begun = None
            number += 1
        self._number = number


def _within(pieces: Sequence[memoryview], position: int, start: int, end: int) -> list[memoryview]:
    """What of the pieces, the first of which is at `position`, lies in [start, end)."""
    inside = []
    for piece in pieces:
        after = position + piece.nbytes
        first, last = max(start - position, 0), piece.nbytes - max(after - end, 0)
        if first < last:
            inside.append(piece[first:last])
        position = after
    return inside
