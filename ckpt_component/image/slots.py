"""The places of a layout's payloads in an arena."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import overload

import torch

from ..memory.int_columns import column_of
from ..state.structure import Stored, contiguous_stride


class Slots(Sequence[torch.Tensor]):
    """Where the payloads of a layout's items belong in an arena: addresses at once, tensors when they are asked for.

    Copies of small tensors in host memory need the addresses alone, and a tensor takes microseconds and a kilobyte.

    Args:
        slab: the arena's bytes.
        starts: where each payload starts in there.
        entries: what is stored there.

    Attributes:
        addresses: of the payloads, int64.
        sizes: of the payloads in bytes, int64.
    """

    def __init__(self, slab: torch.Tensor, starts: Sequence[int], entries: Sequence[Stored]) -> None:
        self._starts = array("q", starts)
        self._entries = entries
        self._slabs: dict[torch.dtype, torch.Tensor] = {torch.uint8: slab}
        self._made: list[torch.Tensor | None] = [None] * len(entries)
        self.addresses = column_of(self._starts) + slab.data_ptr()
        self.sizes = column_of(entry.nbytes for entry in entries)

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, number: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, number: slice) -> list[torch.Tensor]: ...

    def __getitem__(self, number: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        made = self._made[number]
        if made is None:
            made = self._made[number] = self._make(self._entries[number], self._starts[number])
        return made

    def release(self) -> None:
        """Let go of the arena's memory."""
        self._slabs, self._made = {}, []

    def _make(self, entry: Stored, start: int) -> torch.Tensor:
        if start % entry.dtype.itemsize:
            return self._slabs[torch.uint8][start : start + entry.nbytes].view(entry.dtype).view(entry.shape)
        slab = self._slabs.get(entry.dtype)
        if slab is None:
            slab = self._slabs[entry.dtype] = self._slabs[torch.uint8].view(entry.dtype)
        return slab.as_strided(entry.shape, contiguous_stride(entry.shape), start // entry.dtype.itemsize)
