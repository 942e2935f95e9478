"""Stagers that wait for a copy into an arena: `shared_memory`, and `pinned`, the fastest copy from a CUDA device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

import psutil
import torch

from ..core.gc_control import collector_paused
from ..core.image.arena import Arena
from ..core.image.arena_pool import ArenaPool
from ..core.image.copy import CopyPlan, CopyTasks, sources_of
from ..core.image.layout import Layout
from ..core.image.live_source import LiveSource
from ..core.image.unchanged_files import UnchangedFiles
from ..core.options import ARENAS
from ..core.outside import OUTSIDE, Future, Outside
from ..formats.writer import FormatPlan
from ..state.flatten import FlatState
from ..state.replicas import likely_bytes
from .base import Snapshot, Stager, StatePlan, check_objects


class LiveStager(Stager):
    """Uses no memory, and needs `caller=inline`, because the state must not change until it is written."""

    takes_snapshot: ClassVar[bool] = False

    def take(self, plan: StatePlan) -> Snapshot:
        """Lay out the state; its tensors are read when they are written."""
        format_plan, flat = self._plan_for(plan)
        encoded = format_plan.encode_objects(flat.objects)
        with torch.no_grad():
            source = LiveSource(format_plan.layout, flat)
        layout, unchanged = format_plan.layout, self._reuse.look(format_plan.layout, flat, plan.storage)
        if unchanged is not None:
            sources, _ = sources_of(layout, flat)
            for file in unchanged.candidates:
                unchanged.prove(file, sources)
        snapshot = Snapshot(layout, encoded, source, unchanged=unchanged)
        snapshot.mark_staged()
        return snapshot


logger = logging.getLogger(__name__)

#: Called once: with None when everything is copied, or with an error.
Settle = Callable[[BaseException | None], None]


class ArenaFill:
    """An arena, and what is copied into it.

    Args:
        arena: the leased arena
        layout: of the image
        flat: the state
        unchanged: the files that may be shared, whose candidates are proved and not copied; None: there are none
        outside: whose threads copy

    Attributes:
        proofs: numbers of the items of each candidate, by number of the file
        slots: slots of the arena, one for every item of the layout
        sources: what is copied into each slot
        addresses: memory address of each source, int64
    """

    def __init__(
        self,
        arena: Arena,
        layout: Layout,
        flat: FlatState,
        unchanged: UnchangedFiles | None = None,
        outside: Outside = OUTSIDE,
    ) -> None:
        self._outside = outside
        self.arena = arena
        self.flat = flat
        self.unchanged = unchanged
        self.proofs = {} if unchanged is None else {file: unchanged.items[file] for file in unchanged.candidates}
        self.slots = arena.slots(layout)
        self.sources, self.addresses = sources_of(layout, flat)

    def tasks(self, plan: CopyPlan, *, at_once: bool = True) -> CopyTasks:
        """A copy by one of the arena's plans; `at_once`: no tensor can get other memory before it is made."""
        prove = None if self.unchanged is None else self.unchanged.prove
        return CopyTasks(plan, self.sources, self.addresses if at_once else None, prove, outside=self._outside)

    def without_proofs(self, numbers: Iterable[int]) -> list[int]:
        """Those of some items that are not in a candidate."""
        proved = {number for items in self.proofs.values() for number in items}
        return [number for number in numbers if number not in proved]


class SharedMemoryStager(Stager):
    """Copies into arenas, each leased to one save; `take` returns when the copy is done.

    Args:
        arenas: how many saves may be in flight, each with its own copy of the state in host memory

    Raises:
        CheckpointConfigError: `arenas` is not from 1 to 16
    """

    def __init__(self, arenas: int = 1) -> None:
        ARENAS.check("checkpoint.stager.arenas", arenas)
        self._arenas = arenas

    def _connected(self, *, shared: bool) -> None:
        self._images = self._kept + max(self._arenas, self._in_flight)
        self._pool = ArenaPool(self._images, shared=shared, outside=self._ranks.outside)

    def wait_free(self, deadline: float) -> bool:
        """Wait for an arena; see `Stager.wait_free`."""
        return self._pool.wait_free(deadline)

    @property
    def host_bytes(self) -> int:
        """Total size of the arenas."""
        return self._pool.nbytes

    def take(self, plan: StatePlan) -> Snapshot:
        """Copy everything into an arena; see `Stager.take`."""
        # The slots stay for later saves, which may write into them outside of inference mode.
        with collector_paused(), torch.inference_mode(False), torch.no_grad():
            format_plan, flat = self._plan_for(plan)
            layout, encoded = format_plan.layout, format_plan.encode_objects(flat.objects)
            timeout = min(self._timeout, max(plan.wait_until - self._ranks.outside.now(), 0))
            planned_at = perf_counter()
            arena = self._pool.lease(layout.arena_bytes, timeout)
            give_back, unchanged = self._pool.give_back, self._reuse.look(layout, flat, plan.storage)
            snapshot = Snapshot(layout, encoded, arena, arena, give_back, planned_at=planned_at, unchanged=unchanged)
            try:
                rest = self._fill(ArenaFill(arena, layout, flat, unchanged, self._ranks.outside), snapshot.mark_staged)
                snapshot.copied = rest or snapshot.staged
            except BaseException as error:
                snapshot.mark_staged(error)
                snapshot.release()
                raise
        return snapshot

    def _planned(self, plan: FormatPlan) -> None:
        """Warn if there is not enough memory for all arenas, which are allocated when saves follow closely."""
        each, more = plan.layout.arena_bytes, self._images - self._arenas
        available = psutil.virtual_memory().available + self._pool.nbytes
        if self._images > 1 and self._images * each > available:
            logger.warning(
                "checkpoint.stager.arenas=%d may take %.2f GB of memory (%.2f GB each%s), and %.2f GB are available; "
                "use %d%s, or saves that follow each other closely will fail",
                self._arenas,
                self._images * each / 1e9,
                each / 1e9,
                f", with {more} more for checkpoint/recovery" if more else "",
                available / 1e9,
                max(int(available // each) - more, 1),
                " or checkpoint/recovery=none" if more else "",
            )

    def _fill(self, fill: ArenaFill, settle: Settle) -> Future[None] | None:
        """Copy the state into the arena, and call `settle` now or later. Returns the rest of the copy, if any."""
        key = ("all", *fill.proofs)
        plan = fill.slots.plans.get(key)
        if plan is None:
            plan = CopyPlan(fill.slots, fill.sources, fill.without_proofs(range(len(fill.sources))), fill.proofs)
            self._prepare(fill.arena, plan.device)
            fill.slots.plans[key] = plan
        fill.tasks(plan).finish(torch.get_num_threads())
        settle(None)
        return None

    def _prepare(self, arena: Arena, device: torch.device | None) -> None:
        """Called before the first copy of a structure into an arena, with the CUDA device of its sources or None."""

    def prewarm(self, plan: StatePlan) -> None:
        """Plan, and fill every arena once, so that its pages exist before the first save."""
        format_plan, flat = self._plan_for(plan)
        layout = format_plan.layout
        arenas: list[Arena] = []
        try:
            for _ in range(self._images):
                arenas.append(self._pool.lease(layout.arena_bytes, self._timeout))
            with torch.inference_mode(False), torch.no_grad():
                for arena in arenas:
                    self._warm(ArenaFill(arena, layout, flat, outside=self._ranks.outside))
        finally:
            for arena in arenas:
                self._pool.give_back(arena)

    def prepare(self, plan: StatePlan) -> None:
        """Plan, and make the arenas in the background; here and now if no other process must see them."""
        if self._pool.awaits_first_lease:
            self._make_early(plan, self._plan_for(plan)[0].layout.arena_bytes)
        else:
            self.prewarm(plan)

    def reserve(self, state_dict: Mapping[Any, Any]) -> None:
        """Begin to make the arenas, and plan if no other rank takes part in that; see `Stager.reserve`."""
        if not self._pool.awaits_first_lease:
            return
        plan = self.inspect(state_dict)
        check_objects(plan.flat)
        if plan.changed and (self._ranks.world_size == 1 or not self._writer.shared):
            with collector_paused(), torch.no_grad():
                self.prepare(plan)
        elif plan.changed:
            self._make_early(plan, likely_bytes(plan.structure, plan.flat, self._ranks.rank, self._ranks.world_size))
        self._pool.start_early()

    def _make_early(self, plan: StatePlan, nbytes: int) -> None:
        """Begin to make the arenas of a plan in the background, of `nbytes` each."""
        device = next((tensor.device for tensor in plan.flat.tensors if tensor.is_cuda), None)
        self._pool.reserve(nbytes, partial(self._prepare, device=device))

    def _warm(self, fill: ArenaFill) -> None:
        """Fill an arena that no save uses."""
        self._fill(fill, lambda error: None)

    def close(self) -> None:
        """Free the arenas."""
        self._pool.close()


class PinnedStager(SharedMemoryStager):
    """Like `shared_memory`, but arenas are page-locked if tensors are on a CUDA device."""

    _logged_pageable = False

    def _prepare(self, arena: Arena, device: torch.device | None) -> None:
        """Page-lock an arena that is filled from `device`, unless it is locked already."""
        if device is not None:
            arena.page_lock(device)
        elif not self._logged_pageable:
            self._logged_pageable = True
            logger.info("no tensor is on a CUDA device, so the memory of snapshots is not page-locked")
