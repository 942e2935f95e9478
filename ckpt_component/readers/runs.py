"""Many small neighbours are read at once: a system call per item costs more than its bytes.

A run is a range of one file that one system call spreads: payloads into their tensors, all between them into memory of
the thread's own. Then every item's checksum is compared, over the pieces.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Iterator, Sequence

from ..storage.checksum import Checksum
from .ranges import OpenFiles
from .source import Request
from .tables import StoredItem

#: Larger items are read straight into their tensors.
SMALL_BYTES = 256 << 10
#: So few that the checksums find the bytes in the processor's cache.
_RUN_BYTES = 1 << 20
#: Bytes that nobody asked for, such as other items, are rather read along than jumped over up to this gap.
_GAP_BYTES = 32 << 10


#: An item, and the request that wants all of it: contiguous, in CPU memory, with the payload's size.
Landing = tuple[StoredItem, Request]


def runs_of(landings: Sequence[Landing]) -> Iterator[Sequence[Landing]]:
    """Cut landings of one file, sorted by offset, into runs of neighbours."""
    first, start, end = 0, landings[0][0].offset, 0
    for number, (item, _) in enumerate(landings):
        offset = item.offset
        # What is tied overlaps, and is read again.
        if number > first and not (0 <= offset - end <= _GAP_BYTES and offset + item.length - start <= _RUN_BYTES):
            yield landings[first:number]
            first, start = number, offset
        end = offset + item.length
    yield landings[first:]


class Gaps(threading.local):
    """Memory for what a run has between its payloads, one for every thread, used again and again."""

    def __init__(self) -> None:
        self._bytes = bytearray(_RUN_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self.view = memoryview(self._bytes)


def read_run(
    files: OpenFiles, name: str, run: Sequence[Landing], checksum: Checksum | None, gaps: Gaps
) -> Request | None:
    """Fill the tensors of a run.

    Args:
        files: of the checkpoint.
        name: of the file.
        run: of `runs_of`.
        checksum: of the items; None: they are not verified.
        gaps: this thread's.

    Returns:
        The first whose bytes are not those that were written, or None.

    Raises:
        CheckpointUnreadableError: the read fails.
    """
    pieces, marks = array("q"), []
    (first, _), (last, its_request) = run[0], run[-1]
    position, filled, address_of_gaps = first.offset, 0, gaps.address
    for item, request in run:
        gap, address = item.payload - position, request.destination.data_ptr()
        pieces.extend((address_of_gaps + filled, gap, address, item.nbytes))
        filled += gap
        marks.append((address, filled))
        position = item.payload + item.nbytes
    pieces.extend((address_of_gaps + filled, last.offset + last.length - position))
    if not files.fill_memory(name, pieces, first.offset):
        return its_request
    if checksum is None:
        return None
    between, taken, window = gaps.view, checksum.of_three, _Window.from_address
    for (item, request), (address, mark) in zip(run, marks, strict=True):
        before = between[mark - (item.payload - item.offset) : mark]
        after = between[mark : mark + (item.offset + item.length) - (item.payload + item.nbytes)]
        payload = memoryview(window(address))[: item.nbytes] if item.nbytes else _NOTHING
        if taken(before, payload, after) != item.checksum:
            return request
    return None


#: One type for memory of any length up to it: to make one for each length takes longer than to read it.
_Window = ctypes.c_char * SMALL_BYTES
_NOTHING = memoryview(b"")
