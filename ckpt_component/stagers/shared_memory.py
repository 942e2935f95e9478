"""`shared_memory`: awaited copies into a memfd arena that is not page-locked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from ..image.arena import Arena
from ..image.layout import Layout, addresses_of
from ..image.tree import FlatState
from .base import ArenaStager, Snapshot
from .copying import ArenaCopies, copy_now


class SharedMemoryStager(ArenaStager):
    """`take` returns when the copy is done.

    Args:
        arenas: how many saves may be in flight, each with its own copy of the state in host memory.
    """

    option: ClassVar[str] = "shared_memory"

    def __init__(self, arenas: int = 1) -> None:
        super().__init__(arenas)
        self._copies = ArenaCopies()

    def _copy(
        self,
        snapshot: Snapshot,
        arena: Arena,
        flat: FlatState,
        slots: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        plan = self._copies.plan(arena.number, slots, sources)
        copy_now(plan, sources, addresses_of(snapshot.layout, flat.pointers, sources))
        snapshot.mark_staged()

    def _warm(
        self,
        arena: Arena,
        layout: Layout,
        flat: FlatState,
        slots: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        copy_now(self._copies.plan(arena.number, slots, sources), sources)

    def close(self) -> None:
        """Free the arenas."""
        self._copies.forget()
        super().close()
