"""Parallel writers: each writes its ranges of the image, block by block, and computes checksums.

Direct I/O writes whole pages past the page cache: they are durable sooner, and nothing that training has in the cache
is evicted. A range that begins or ends inside a page is widened to whole pages; the adjacent range writes the same
bytes there, because both come from the same image.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

from ..memory.huge_pages import align, align_down
from ..outside import OUTSIDE, Future, Outside, Pool
from ..storage.checksum import Checksum, Stream
from .request import WriteRequest
from .write_table import Lane

_Result = TypeVar("_Result")

#: This much is still in the core's cache (2 MB) when its checksum is computed right after the copy.
_CACHED_BYTES = 512 << 10


class Throttle:
    """Limits the combined write rate of all lanes.

    Args:
        bytes_per_second: None: no limit
        outside: what they wait by
    """

    def __init__(self, bytes_per_second: float | None, outside: Outside = OUTSIDE) -> None:
        self._rate = bytes_per_second
        self._outside = outside
        self._lock = outside.lock()
        self._free_at = outside.now()

    def wait(self, nbytes: int) -> None:
        """Block for as long as `nbytes` more bytes take at the rate, after those of the calls before."""
        if self._rate is None:
            return
        with self._lock:
            self._free_at = until = max(self._free_at, self._outside.now()) + nbytes / self._rate
        self._outside.sleep(max(until - self._outside.now(), 0))


class LaneWriter:
    """Writes the lanes of one request.

    Args:
        request: which bytes go where, and how
        descriptors: open files of the table, by number; those without one are not written
        checksum: algorithm of the items' checksums
        sums: checksums by item number; filled in
        direct: whether the descriptors bypass the page cache
        in_memory: whether the files are kept only in memory, so that a write is just a copy
    """

    def __init__(
        self,
        request: WriteRequest,
        descriptors: Mapping[int, int],
        checksum: Checksum,
        sums: list[int],
        *,
        direct: bool,
        in_memory: bool,
    ) -> None:
        self._fs = request.fs
        self._outside = request.fs.outside
        self._source = request.source
        self._table = request.table
        self._descriptors = descriptors
        self._checksum = checksum
        self._sums = sums
        self._direct = direct
        self._in_memory = in_memory
        self._block_bytes = align(request.options.block_bytes)
        self._throttle = Throttle(request.options.max_bytes_per_second, self._outside)
        self._failed: list[BaseException] = []

    def run(self) -> None:
        """Write all lanes: the groups in parallel, the lanes of a group in order.

        Raises:
            OSError: the first failure; the other writers stop at their next block
        """
        written = [[lane for lane in lanes if lane.file in self._descriptors] for lanes in self._table.lanes]
        groups: Sequence[Sequence[Lane]] = [lanes for lanes in written if lanes]
        if self._fs.streams:
            groups = _by_file(groups)
        # Without a device to wait for, checksum threads would compete with the copying threads for too few cores.
        alone = self._in_memory and len(os.sched_getaffinity(0)) < 2 * len(groups)
        with self._outside.pool(len(groups), "ckpt-write") as pool:
            for lanes in groups:
                pool.submit(self._run_group, lanes, alone)
        if self._failed:
            raise self._failed[0]

    def _run_group(self, lanes: Sequence[Lane], alone: bool) -> None:
        try:
            # A second thread computes checksums (zlib: 2 GB/s) and gathers live tensors while this one writes; each of
            # the three takes about as long as the others.
            with self._outside.pool(1, "ckpt-sum") as helper:
                for lane in lanes:
                    if alone:
                        self._write_alone(lane)
                    else:
                        self._write(lane, helper)
        except BaseException as error:
            self._failed.append(error)

    def _ranges(self, lane: Lane, nbytes: int) -> list[tuple[int, int]]:
        """Split a lane into the ranges of successive write calls."""
        start, stop = lane.start, lane.end
        if self._direct:
            start, stop = align_down(start), align(stop)
        return [(at, min(at + nbytes, stop)) for at in range(start, stop, nbytes)]

    def _pieces(self, lane: Lane, start: int, end: int) -> list[memoryview]:
        """Return the bytes of a range of a lane's file."""
        base = self._table.files[lane.file].base
        pieces = self._source.buffers(base + start, base + end, whole=self._direct)
        if self._fs.streams and not self._source.lasting:
            pieces = [memoryview(b"".join(pieces))]
        return pieces

    def _write_alone(self, lane: Lane) -> None:
        """Write and checksum a lane in one thread, while data is in cache: on two cores 1.2 times as fast as in two."""
        descriptor, cursor = self._descriptors[lane.file], SumCursor(lane, self._checksum, self._sums)
        for position, end in self._ranges(lane, min(self._block_bytes, _CACHED_BYTES)):
            if self._failed:
                return
            pieces = self._pieces(lane, position, end)
            self._throttle.wait(end - position)
            self._fs.write(descriptor, pieces, position)
            cursor.feed(_within(pieces, position, lane.start, lane.end))

    def _write(self, lane: Lane, helper: Pool) -> None:
        descriptor, cursor = self._descriptors[lane.file], SumCursor(lane, self._checksum, self._sums)
        ranges = self._ranges(lane, self._block_bytes)
        next_pieces = helper.submit(self._pieces, lane, *ranges[0]) if ranges else None
        last_sum: Future[None] | None = None
        for number, (position, end) in enumerate(ranges, 1):
            if self._failed or next_pieces is None:
                return
            pieces = self._result(next_pieces)
            if last_sum is not None:
                last_sum.result(0)  # done, as it was submitted before this fetch; a failure ends the lane here
            # From the image, not from the file, so that it also covers the write. The helper keeps the order of blocks.
            last_sum = helper.submit(cursor.feed, _within(pieces, position, lane.start, lane.end))
            next_pieces = helper.submit(self._pieces, lane, *ranges[number]) if number < len(ranges) else None
            self._throttle.wait(end - position)
            self._fs.write(descriptor, pieces, position)
            if not self._direct:
                self._fs.start_writeback(descriptor, position, end - position)
        if last_sum is not None:
            self._result(last_sum)

    def _result(self, future: Future[_Result]) -> _Result:
        """What the helper returns, or raises."""
        self._outside.wait_for([future], None)
        return future.result(0)


class SumCursor:
    """Takes the bytes of a lane in order and records one checksum per item; skips the bytes between items."""

    def __init__(self, lane: Lane, checksum: Checksum, sums: list[int]) -> None:
        self._places = lane.places
        self._number = lane.first
        self._last = lane.first + len(lane.places) // 2
        self._first = lane.first
        self._position = lane.start
        self._checksum = checksum
        self._sums = sums
        #: Checksum of the item in which the last piece ended.
        self._partial: Stream | None = None

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
                partial = self._partial = self._partial or self._checksum.stream()
                partial.update(piece[max(offset, start) - start : min(end, stop) - start])
                if end > stop:
                    break
                sums[number] = partial.value()
                self._partial = None
            number += 1
        self._number = number


def _by_file(groups: Sequence[Sequence[Lane]]) -> list[list[Lane]]:
    """The lanes of each file, in the order of its bytes."""
    files: dict[int, list[Lane]] = {}
    for lane in sorted(itertools.chain.from_iterable(groups), key=lambda lane: lane.start):
        files.setdefault(lane.file, []).append(lane)
    return list(files.values())


def _within(pieces: Sequence[memoryview], position: int, start: int, end: int) -> list[memoryview]:
    """Clip pieces, the first of which is at `position`, to [start, end)."""
    inside = []
    for piece in pieces:
        after = position + piece.nbytes
        first, last = max(start - position, 0), piece.nbytes - max(after - end, 0)
        if first < last:
            inside.append(piece[first:last])
        position = after
    return inside
