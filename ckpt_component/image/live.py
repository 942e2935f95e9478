"""An image that is not in memory: its bytes are taken from the live tensors while they are written."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence

import torch

from .arena import tensor_bytes
from .layout import ITEM_ALIGNMENT, Layout, sources_of

_ZEROS = memoryview(bytes(ITEM_ALIGNMENT))


class LiveSource:
    """The bytes of an image by range, straight from the tensors (only those not contiguous on the CPU are copied).

    Safe for several threads. The tensors must not change until the write is done.
    """

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = sources_of(layout, tensors)
        self._parts: list[tuple[int, int, memoryview | int]] = []
        for position, data in layout.fixed_parts():
            self._parts.append((position, len(data), memoryview(data)))
        for number, item in enumerate(layout.items):
            self._parts.append((layout.payload_at(item), item.nbytes, number))
        self._parts = sorted((part for part in self._parts if part[1]), key=lambda part: part[0])
        self._starts = [part[0] for part in self._parts]
        self._copies = threading.local()

    def buffers(self, start: int, end: int) -> list[memoryview]:
        """The bytes [start, end) of the image, in pieces; what lies between items is zero."""
        pieces: list[memoryview] = []
        position = start
        number = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while position < end and number < len(self._parts):
            at, length, part = self._parts[number]
            if at >= end:
                break
            if at + length > position:
                if at > position:
                    pieces.append(_zeros(at - position))
                    position = at
                stop = min(at + length, end)
                view = part if isinstance(part, memoryview) else self._payload(part)
                pieces.append(view[position - at : stop - at])
                position = stop
            number += 1
        if position < end:
            pieces.append(_zeros(end - position))
        return pieces

    def _payload(self, number: int) -> memoryview:
        tensor = self._tensors[number]
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor_bytes(tensor)
        # A lane goes through its items in order, so one copy per thread is enough; it lives until the next one.
        held = getattr(self._copies, "held", None)
        if held is None or held[0] != number:
            copied = tensor.cpu().resolve_conj().resolve_neg().contiguous()
            held = self._copies.held = (number, copied)
        return tensor_bytes(held[1])


def _zeros(count: int) -> memoryview:
    return _ZEROS[:count] if count <= len(_ZEROS) else memoryview(bytes(count))
