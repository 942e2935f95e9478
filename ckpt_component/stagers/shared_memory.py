"""`shared_memory`: awaited copies into a memfd arena that is not page-locked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from ..image.tree import FlatState
from .base import ArenaStager, Snapshot
from .copying import DeviceCopies


class SharedMemoryStager(ArenaStager):
    """`take` returns when the copy is done.

    Args:
        arenas: how many saves may be in flight, each with its own copy of the state in host memory.
    """

    option: ClassVar[str] = "shared_memory"

    def __init__(self, arenas: int = 1) -> None:
        super().__init__(arenas)
        self._copies = DeviceCopies()

    def _copy(
        self, snapshot: Snapshot, flat: FlatState, slots: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        for event in self._copies.start(slots, sources):
            event.synchronize()
        snapshot.mark_staged()
