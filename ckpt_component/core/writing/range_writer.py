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

from ..outside import OUTSIDE, Future, Latch, Outside, Pool
from ..pages import align, align_down
from ..storage.checksum import Checksum, Stream
from .request import Extent, WriteRequest

_Result = TypeVar("_Result")

#: This much is still in the core's cache (2 MB) when its checksum is computed right after the copy.
_CACHED_BYTES = 512 << 10


class Throttle:
    """Limits the combined write rate of all extents.

    Args:
        bytes_per_second: None: no limit
        outside: what they wait by
        ended: once it is set, they wait no more; None: they wait by the rate alone
    """

    def __init__(self, bytes_per_second: float | None, outside: Outside = OUTSIDE, ended: Latch | None = None) -> None:
        self._rate = bytes_per_second
        self._outside, self._sleep = outside, outside.sleep if ended is None else ended.wait
        self._lock = outside.lock()
        self._free_at = outside.now()

    def wait(self, nbytes: int) -> None:
        """Block for as long as `nbytes` more bytes take at the rate, after those of the calls before."""
        if self._rate is None:
            return
        with self._lock:
            self._free_at = until = max(self._free_at, self._outside.now()) + nbytes / self._rate
        self._sleep(max(until - self._outside.now(), 0))


class LaneWriter:
    """Writes the extents of one request.

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
        """Write all extents: the groups in parallel, the extents of a group in order.

        Raises:
            OSError: the first failure; the other writers stop at their next block
        """
        written = [
            [extent for extent in extents if extent.file in self._descriptors] for extents in self._table.extents
        ]
        groups: Sequence[Sequence[Extent]] = [extents for extents in written if extents]
        if self._fs.streams:
            groups = _by_file(groups)
        # Without a device to wait for, checksum threads would compete with the copying threads for too few cores.
        alone = self._in_memory and len(os.sched_getaffinity(0)) < 2 * len(groups)
        with self._outside.pool(len(groups), "ckpt-write") as pool:
            for extents in groups:
                pool.submit(self._run_group, extents, alone)
        if self._failed:
            raise self._failed[0]

    def _run_group(self, extents: Sequence[Extent], alone: bool) -> None:
        try:
            # A second thread computes checksums (zlib: 2 GB/s) and gathers live tensors while this one writes; each of
            # the three takes about as long as the others.
            with self._outside.pool(1, "ckpt-sum") as helper:
                for extent in extents:
                    if alone:
                        self._write_alone(extent)
                    else:
                        self._write(extent, helper)
        except BaseException as error:
            self._failed.append(error)

    def _ranges(self, extent: Extent, nbytes: int) -> list[tuple[int, int]]:
        """Split an extent into the ranges of successive write calls."""
        start, stop = extent.start, extent.end
        if self._direct:
            start, stop = align_down(start), align(stop)
        return [(at, min(at + nbytes, stop)) for at in range(start, stop, nbytes)]

    def _pieces(self, extent: Extent, start: int, end: int) -> list[memoryview]:
        """Return the bytes of a range of an extent's file."""
        base = self._table.files[extent.file].base
        pieces = self._source.buffers(base + start, base + end, whole=self._direct)
        if self._fs.streams and not self._source.lasting:
            pieces = [memoryview(b"".join(pieces))]
        return pieces

    def _write_alone(self, extent: Extent) -> None:
        """Write and checksum an extent in one thread, from the cache: on two cores 1.2 times as fast as in two."""
        descriptor, cursor = self._descriptors[extent.file], SumCursor(extent, self._checksum, self._sums)
        for position, end in self._ranges(extent, min(self._block_bytes, _CACHED_BYTES)):
            if self._failed:
                return
            pieces = self._pieces(extent, position, end)
            self._throttle.wait(end - position)
            self._fs.write(descriptor, pieces, position)
            cursor.feed(_within(pieces, position, extent.start, extent.end))

    def _write(self, extent: Extent, helper: Pool) -> None:
        descriptor, cursor = self._descriptors[extent.file], SumCursor(extent, self._checksum, self._sums)
        ranges = self._ranges(extent, self._block_bytes)
        next_pieces = helper.submit(self._pieces, extent, *ranges[0]) if ranges else None
        last_sum: Future[None] | None = None
        for number, (position, end) in enumerate(ranges, 1):
            if self._failed or next_pieces is None:
                return
            pieces = self._result(next_pieces)
            if last_sum is not None:
                last_sum.result(0)  # done, as it was submitted before this fetch; a failure ends the extent here
            # From the image, not from the file, so that it also covers the write. The helper keeps the order of blocks.
            last_sum = helper.submit(cursor.feed, _within(pieces, position, extent.start, extent.end))
            next_pieces = helper.submit(self._pieces, extent, *ranges[number]) if number < len(ranges) else None
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
    """Takes the bytes of an extent in order and records one checksum per item; skips the bytes between items."""

    def __init__(self, extent: Extent, checksum: Checksum, sums: list[int]) -> None:
        self._places = extent.places
        self._number = extent.first
        self._last = extent.first + len(extent.places) // 2
        self._first = extent.first
        self._position = extent.start
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


def _by_file(groups: Sequence[Sequence[Extent]]) -> list[list[Extent]]:
    """The extents of each file, in the order of its bytes."""
    files: dict[int, list[Extent]] = {}
    for extent in sorted(itertools.chain.from_iterable(groups), key=lambda extent: extent.start):
        files.setdefault(extent.file, []).append(extent)
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
