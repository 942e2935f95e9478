"""What the stagers share that copy into an arena: leasing one, and what goes into it."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from ..coordination import Coordinator
from ..formats.base import FormatPlan, Writer
from ..image.arena import Arena, ArenaPool
from ..image.layout import Layout, sources_of
from ..memory.gc_control import collector_paused
from ..options import ARENAS
from ..state.flatten import FlatState
from ..writing.write_job import MemorySource
from .base import Stager
from .snapshot import Snapshot, Survey

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Filling:
    """An arena and what goes into it.

    Attributes:
        arena: leased.
        layout: what lies where in it.
        flat: the state.
        slots: of the arena, a tensor for every item; the same list for the same layout.
        sources: what is copied into each.
        tracks: begin and end in the arena of what each parallel writer writes, ascending.
    """

    arena: Arena
    layout: Layout
    flat: FlatState
    slots: Sequence[torch.Tensor]
    sources: Sequence[torch.Tensor]
    tracks: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, arena: Arena, layout: Layout, flat: FlatState, tracks: Sequence[tuple[int, int]]) -> Filling:
        """Of a state that has this layout, and tracks in it; to be used under `no_grad`."""
        return cls(arena, layout, flat, arena.slots(layout), sources_of(layout, flat.tensors), tracks)

    @property
    def base(self) -> int:
        """The address that the arena begins at."""
        return self.arena.slab.data_ptr()


class ArenaStager(Stager):
    """A stager that copies into leased arenas.

    Args:
        arenas: how many saves may be in flight, each with its own copy of the state in host memory.

    Raises:
        CheckpointConfigError: `arenas` is out of range.
    """

    def __init__(self, arenas: int = 1) -> None:
        ARENAS.check("checkpoint.stager.arenas", arenas)
        self._arenas = arenas

    def connect(self, writer: Writer, *, ranks: Coordinator, shared: bool, timeout: float) -> None:
        """Learn the rest of the graph; see `Stager.connect`."""
        super().connect(writer, ranks=ranks, shared=shared, timeout=timeout)
        self._pool = ArenaPool(self._arenas, shared=shared)

    @property
    def busy(self) -> bool:
        """Whether all arenas are being written."""
        return self._pool.busy

    def wait_free(self, deadline: float) -> bool:
        """Wait for an arena; see `Stager.wait_free`."""
        return self._pool.wait_free(deadline)

    def take(self, survey: Survey) -> Snapshot:
        """Copy everything into an arena; see `Stager.take`."""
        with collector_paused(), torch.no_grad():
            plan, flat = self._plan_for(survey)
            sealed = plan.seal(flat.objects)
            patience = min(self._timeout, max(survey.wait_until - time.monotonic(), 0))
            arena = self._pool.lease(plan.layout.arena_bytes, patience)
            source = MemorySource(arena.memory)
            snapshot = Snapshot(plan.layout, sealed, source, survey.started, arena, self._pool.give_back)
            try:
                self._copy(Filling.of(arena, plan.layout, flat, sealed.table.tracks), snapshot)
            except BaseException as error:
                snapshot.mark_staged(error)
                snapshot.release()
                raise
        return snapshot

    def _planned(self, plan: FormatPlan) -> None:
        """Warn of more arenas than there is memory for: they are made when saves come close to each other."""
        each = plan.layout.arena_bytes
        available = psutil.virtual_memory().available + self._pool.idle_bytes
        if self._arenas > 1 and self._arenas * each > available:
            logger.warning(
                "checkpoint.stager.arenas=%d may take %.2f GB of memory (%.2f GB each), and %.2f GB are available; "
                "use %d, or saves that come close to each other will fail",
                self._arenas,
                self._arenas * each / 1e9,
                each / 1e9,
                available / 1e9,
                max(int(available // each), 1),
            )

    @abstractmethod
    def _copy(self, filling: Filling, snapshot: Snapshot) -> None:
        """Copy what goes into the arena, and settle `snapshot.staged` now or later."""

    def prewarm(self, state_dict: Mapping[Any, Any]) -> None:
        """Plan, and fill every arena once, so that its pages exist before the first save."""
        plan, flat = self._plan_for(self._surveyed_together(state_dict))
        tracks = plan.seal(flat.objects).table.tracks
        arenas: list[Arena] = []
        try:
            for _ in range(self._arenas):
                arenas.append(self._pool.lease(plan.layout.arena_bytes, self._timeout))
            with torch.no_grad():
                for arena in arenas:
                    self._warm(Filling.of(arena, plan.layout, flat, tracks))
        finally:
            for arena in arenas:
                self._pool.give_back(arena)

    def _warm(self, filling: Filling) -> None:
        """Fill an arena that no save uses, as `_copy` will."""
        for slot in filling.slots:
            slot.zero_()

    def close(self) -> None:
        """Free the arenas."""
        self._pool.close()
