"""An image that is not in memory: its bytes are gathered from the live tensors while they are written."""

from __future__ import annotations

import bisect
import mmap
import threading
from array import array
from dataclasses import dataclass, field

from ..memory.huge_pages import PAGE, address_of, align, map_private
from ..memory.libc import memmove, memset
from ..state.dense_tensors import plain_addresses
from ..state.flatten import FlatState
from .arena import tensor_bytes
from .gather import MOST_PIECES, Gather
from .layout import Layout, sources_of

#: From here on a piece is worth a call of its own.
_LARGE_BYTES = 512 << 10


class LiveSource:
    """The bytes of an image by range, block by block, as a writer comes to them.

    Each thread has two blocks of memory in turn, so that the one before may still be summed. Nothing else is copied but
    tensors that are not contiguous in host memory, one at a time. The tensors must not change until all is written.

    Args:
        layout: of the image.
        flat: the state.

    Attributes:
        nbytes: of the image.
    """

    def __init__(self, layout: Layout, flat: FlatState) -> None:
        self.nbytes = layout.arena_bytes
        self._layout = layout
        self._bases = [file.base for file in layout.files]
        self._sources = sources_of(layout, flat.tensors)
        self._addresses = plain_addresses(self._sources)
        self._starts = array("q", [self._bases[item.file] + item.offset for item in layout.items])
        self._gather = Gather()
        self._of_thread = threading.local()

    def buffers(self, start: int, end: int, *, whole: bool = False) -> list[memoryview]:
        """The bytes [start, end) of the image; what lies between items is zero. See `ByteSource.buffers`."""
        first = max(bisect.bisect_right(self._starts, start) - 1, 0)
        last = bisect.bisect_left(self._starts, end)
        if last - first == 1 and not whole:
            found = self._within_payload(first, start, end)
            if found is not None:
                return [found]
        block = self._next_block(start, end)
        for number in range(first, last):
            self._put_item(block, number)
        block.fill_up_to(end)
        for position, data in self._layout.constants:
            block.put(position, data)
        block.finish(self._gather)
        return [block.view]

    def wait_whole(self) -> None:
        """The tensors are what they are."""

    def _put_item(self, block: _Block, number: int) -> None:
        item = self._layout.items[number]
        at, around = self._starts[number], self._layout.around
        payload = self._layout.payload_at(item)
        if at + item.length <= block.start:
            return
        block.fill_up_to(at)
        if around is not None:
            prefix, suffix = around(item)
            block.put(at, prefix)
            block.put(at + item.length - len(suffix), suffix)
        address = self._addresses[number]
        if address is None:
            block.put(payload, self._copied(number))
        else:
            block.take(payload, address, item.nbytes)
        block.filled = at + item.length

    def _within_payload(self, number: int, start: int, end: int) -> memoryview | None:
        """The range as it lies in a tensor, where it is all in one."""
        item = self._layout.items[number]
        at = self._layout.payload_at(item)
        if self._addresses[number] is None or start < at or end > at + item.nbytes:
            return None
        return tensor_bytes(self._sources[number])[start - at : end - at]

    def _copied(self, number: int) -> memoryview:
        # A writer goes through its items in order, so one copy per thread is enough; it lives until the next one.
        held = getattr(self._of_thread, "copied", None)
        if held is None or held[0] != number:
            copied = self._sources[number].cpu().resolve_conj().resolve_neg().contiguous()
            held = self._of_thread.copied = (number, copied)
        return tensor_bytes(held[1])

    def _next_block(self, start: int, end: int) -> _Block:
        mine = self._of_thread
        blocks = mine.blocks = getattr(mine, "blocks", [])
        spare = blocks.pop(0) if len(blocks) == 2 else None
        if spare is None or len(spare) < end - start:
            spare = map_private(align(end - start, PAGE))
        blocks.append(spare)
        return _Block(start, end, spare)


@dataclass
class _Block:
    """A range of an image that is put together in memory.

    Attributes:
        start, end: of the range; what is put outside of it is left out.
        memory: begins at a page boundary.
        filled: up to where in the image everything is there, or will be with `finish`.
    """

    start: int
    end: int
    memory: mmap.mmap
    filled: int = 0
    _origins: array[int] = field(default_factory=lambda: array("Q"))
    _targets: array[int] = field(default_factory=lambda: array("Q"))

    def __post_init__(self) -> None:
        self.filled = self.start
        self.view = memoryview(self.memory)[: self.end - self.start]
        self._address = address_of(memoryview(self.memory))

    def put(self, position: int, data: bytes | memoryview) -> None:
        """Put bytes at a place of the image."""
        at, behind = position - self.start, position - self.start + len(data)
        if at >= 0 and behind <= len(self.view):
            self.view[at:behind] = data
        elif at < len(self.view) and behind > 0:
            data = memoryview(data)[max(-at, 0) : len(self.view) - at]
            self.view[max(at, 0) : max(at, 0) + len(data)] = data

    def fill_up_to(self, position: int) -> None:
        """Put zeros where nothing is before a place of the image."""
        position = min(position, self.end)
        if position > self.filled:
            memset(self._address + self.filled - self.start, 0, position - self.filled)
            self.filled = position

    def take(self, position: int, address: int, nbytes: int) -> None:
        """Copy bytes from somewhere in memory to a place of the image; done with `finish`."""
        first, last = max(position, self.start), min(position + nbytes, self.end)
        if last - first >= _LARGE_BYTES:
            # ctypes gives up the GIL meanwhile.
            memmove(self._address + first - self.start, address + first - position, last - first)
        elif first < last:
            self._origins.extend((address + first - position, last - first))
            self._targets.extend((self._address + first - self.start, last - first))

    def finish(self, gather: Gather) -> None:
        """Do the copies of `take`."""
        rows = len(self._origins) // 2
        for first in range(0, rows, MOST_PIECES):
            last = min(first + MOST_PIECES, rows)
            origins, targets = self._origins[2 * first : 2 * last], self._targets[2 * first : 2 * last]
            if not gather(origins.buffer_info()[0], targets.buffer_info()[0], last - first, sum(origins[1::2])):
                for origin, target, nbytes in zip(origins[::2], targets[::2], origins[1::2], strict=True):
                    memmove(target, origin, nbytes)
