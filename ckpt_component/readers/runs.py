"""Many small neighbours are read at once: a system call per item costs more than its bytes.

A run is a range of one file that is read into memory of the thread's own; then every item's checksum is compared, and
its payload copied to where it belongs.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

#: Larger items are read straight into their tensors.
SMALL_BYTES = 256 << 10
_RUN_BYTES = 4 << 20
#: Bytes that nobody asked for, such as other items, are rather read along than jumped over up to this gap.
_GAP_BYTES = 32 << 10


class Landing(NamedTuple):
    """One small item and its tensor.

    Attributes:
        offset: of the item in the file.
        length: of the item.
        payload: where the tensor's bytes begin, from `offset` on.
        checksum: of the item.
        key: for messages.
        target: contiguous, in CPU memory, of the payload's size.
    """

    offset: int
    length: int
    payload: int
    checksum: int
    key: str
    target: torch.Tensor


def runs_of(landings: Sequence[Landing]) -> Iterator[Sequence[Landing]]:
    """Cut landings of one file, sorted by offset, into runs of neighbours."""
    first = 0
    for number in range(1, len(landings) + 1):
        if number < len(landings):
            start, before, this = landings[first].offset, landings[number - 1], landings[number]
            near = this.offset - (before.offset + before.length) <= _GAP_BYTES
            if near and this.offset + this.length - start <= _RUN_BYTES:
                continue
        yield landings[first:number]
        first = number


class Scratch(threading.local):
    """Memory for one run, one for every thread, used again and again: fresh memory costs a page fault per page."""

    def __init__(self) -> None:
        self._bytes = bytearray(_RUN_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self.view = memoryview(self._bytes)

    def put(self, start: int, target: torch.Tensor) -> None:
        """Copy what begins at `start` into a tensor."""
        ctypes.memmove(target.data_ptr(), self.address + start, target.nbytes)
