"""`shared_memory`: awaited copies into a memfd arena that is not page-locked."""

from __future__ import annotations

from typing import ClassVar

from ..image.layout import addresses_of
from .arena_stager import ArenaStager, Filling
from .copying import ArenaCopies, CopyPlan, copy_now
from .snapshot import Snapshot


class SharedMemoryStager(ArenaStager):
    """`take` returns when the copy is done.

    Args:
        arenas: how many saves may be in flight, each with its own copy of the state in host memory.
    """

    option: ClassVar[str] = "shared_memory"

    def __init__(self, arenas: int = 1) -> None:
        super().__init__(arenas)
        self._copies = ArenaCopies()

    def _copy(self, filling: Filling, snapshot: Snapshot) -> None:
        self._warm(filling)
        snapshot.mark_staged()

    def _warm(self, filling: Filling) -> None:
        addresses = addresses_of(filling.layout, filling.flat.pointers, filling.sources)
        copy_now(self._plan_of(filling), filling.sources, addresses)

    def _plan_of(self, filling: Filling) -> CopyPlan:
        return self._copies.plan(filling.arena.number, filling.slots, filling.sources)

    def close(self) -> None:
        """Free the arenas."""
        self._copies.forget()
        super().close()
