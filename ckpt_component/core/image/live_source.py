"""An image without an arena: its bytes are gathered from the live tensors while they are written."""

from __future__ import annotations

import bisect
import mmap
from array import array

from ...state.flatten import FlatState
from ...state.tensors import BATCH, plain_addresses, tensor_bytes
from ..libc import IOV_MAX, memmove
from ..outside import OUTSIDE
from ..pages import address_of, align, map_private
from .copy import LARGE_BYTES, Gather, sources_of
from .layout import Layout


class LiveSource:
    """Provides the bytes of an image block by block, as a writer requests them.

    Each thread alternates between two memory blocks, so that the previous one stays valid for its checksum. Apart from
    the blocks, only tensors that are not contiguous in host memory are copied, one at a time. The tensors must not
    change until everything is written.

    Args:
        layout: layout of the image
        flat: a state of the layout's structure

    Attributes:
        nbytes: size of the image
    """

    lasting = False

    def __init__(self, layout: Layout, flat: FlatState) -> None:
        self.nbytes = layout.arena_bytes
        self._layout = layout
        self._sources, _ = sources_of(layout, flat)
        self._addresses: list[int | None] = []
        for first in range(0, len(self._sources), BATCH):
            self._addresses += plain_addresses(self._sources[first : first + BATCH])
        #: The start of each item in the image, then the end of the image.
        self._starts = array("q", [layout.files[item.file].base + item.offset for item in layout.items])
        self._starts.append(align(self.nbytes))  # direct I/O writes whole pages
        self._gather = Gather()
        self._of_thread = OUTSIDE.thread_values()

    def buffers(self, start: int, end: int, *, whole: bool = False) -> list[memoryview]:
        """The bytes [start, end) of the image; gaps between items are zero. See `ByteSource.buffers`."""
        first = max(bisect.bisect_right(self._starts, start) - 1, 0)
        last = bisect.bisect_left(self._starts, end, hi=len(self._sources))
        if last - first == 1 and not whole:
            inside = self._within_payload(first, start, end)
            if inside is not None:
                return [inside]
        block = self._next_block(start, end)
        for number in range(first, last):
            self._put_item(block, number)
        for position, data in self._layout.constants:
            block.put(position, data)
        block.finish(self._gather)
        return [block.view]

    def _put_item(self, block: _Block, number: int) -> None:
        item = self._layout.items[number]
        start, payload, around = self._starts[number], self._layout.payload_at(item), self._layout.around
        end = start + item.length
        if around is not None:
            prefix, suffix = around(item)
            block.put(start, prefix)
            block.put(end - len(suffix), suffix)
        address = self._addresses[number]
        if address is None:
            block.put(payload, self._copied(number))
        else:
            block.copy(payload, address, item.nbytes)
        block.put(end, bytes(self._starts[number + 1] - end))  # clear the gap: the memory is reused

    def _within_payload(self, number: int, start: int, end: int) -> memoryview | None:
        """A view of the range in the tensor, if it is entirely within one contiguous payload."""
        item = self._layout.items[number]
        at = self._layout.payload_at(item)
        if self._addresses[number] is None or start < at or end > at + item.nbytes:
            return None
        return tensor_bytes(self._sources[number])[start - at : end - at]

    def _copied(self, number: int) -> memoryview:
        # A writer processes its items in order, so each thread caches only its latest copy.
        last = getattr(self._of_thread, "copied", None)
        if last is None or last[0] != number:
            copied = self._sources[number].cpu().resolve_conj().resolve_neg().contiguous()
            last = self._of_thread.copied = (number, copied)
        return tensor_bytes(last[1])

    def _next_block(self, start: int, end: int) -> _Block:
        blocks = self._of_thread.blocks = getattr(self._of_thread, "blocks", [])
        memory = blocks.pop(0) if len(blocks) == 2 else None
        if memory is None or len(memory) < end - start:
            memory = map_private(align(end - start))
        blocks.append(memory)
        return _Block(start, end, memory)


class _Block:
    """A range of an image that is assembled in memory.

    Args:
        start: start of the range; bytes outside of the range are ignored
        end: end of the range
        memory: page-aligned memory for the range

    Attributes:
        view: the bytes of the range; valid after `finish`
    """

    def __init__(self, start: int, end: int, memory: mmap.mmap) -> None:
        self.start, self.end = start, end
        self.view = memoryview(memory)[: end - start]
        #: The address that the first byte of the image would have.
        self._base = address_of(memoryview(memory)) - start
        #: Rows of (address, length) that `finish` copies.
        self._origins, self._targets = array("Q"), array("Q")

    def put(self, position: int, data: bytes | memoryview) -> None:
        """Write bytes at a position of the image."""
        first, last = max(position, self.start), min(position + len(data), self.end)
        if first < last:
            self.view[first - self.start : last - self.start] = memoryview(data)[first - position : last - position]

    def copy(self, position: int, address: int, nbytes: int) -> None:
        """Copy bytes from an address to a position of the image; small copies are deferred to `finish`."""
        first, last = max(position, self.start), min(position + nbytes, self.end)
        if last - first >= LARGE_BYTES:
            memmove(self._base + first, address + first - position, last - first)
        elif first < last:
            self._origins.extend((address + first - position, last - first))
            self._targets.extend((self._base + first, last - first))

    def finish(self, gather: Gather) -> None:
        """Do the deferred copies."""
        for first in range(0, len(self._origins), 2 * IOV_MAX):
            origins, targets = self._origins[first : first + 2 * IOV_MAX], self._targets[first : first + 2 * IOV_MAX]
            gather(origins.buffer_info()[0], targets.buffer_info()[0], len(origins) // 2, sum(origins[1::2]))
