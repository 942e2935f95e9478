"""What a stager is, and what all that copy into an arena share."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..config.errors import CheckpointConfigError
from ..coordination import Coordinator
from ..errors import CheckpointError
from ..image.arena import Arena, ArenaPool
from ..image.collector import collector_paused
from ..image.layout import Layout, Structure, sources_of
from ..image.ownership import Selection, holdings, share_out
from ..image.tree import FlatState, flatten
from ..writers.base import FormatPlan, Sealed, Writer
from ..writers.byte_io import MemorySource
from ..writers.lanes import ByteSource

logger = logging.getLogger(__name__)


class Snapshot:
    """A state dict at one moment, laid out for writing. Owned by the save; `release` must be called once it ended.

    Attributes:
        layout: what lies where.
        sealed: the constant tables, and the encoded objects of this save.
        source: the bytes of the image; complete once `staged` is done.
        arena: the leased memory, or None where there is none.
        started: when the save began (`time.perf_counter`).
        staged: done when the image is complete; training may change every tensor by then, with a device buffer
            sooner (`Stager.wait_staged`). Has the error when staging failed.
    """

    def __init__(
        self,
        layout: Layout,
        sealed: Sealed,
        source: ByteSource,
        started: float,
        arena: Arena | None = None,
        give_back: Callable[[Arena], None] | None = None,
    ) -> None:
        self.layout = layout
        self.sealed = sealed
        self.source = source
        self.arena = arena
        self.staged: Future[None] = Future()
        self.started = started
        self.staged_at = started
        self._give_back = give_back

    def mark_staged(self, error: BaseException | None = None) -> None:
        """Settle `staged`."""
        self.staged_at = time.perf_counter()
        if error is None:
            self.staged.set_result(None)
        else:
            self.staged.set_exception(error)

    def release(self) -> None:
        """Return the arena to its pool, once nothing is copied into it any more; the second call does nothing."""
        arena, self.arena = self.arena, None
        give_back = self._give_back
        if arena is not None and give_back is not None:
            # A save may be given up while its copy still runs. The callback runs at once when it does not.
            self.staged.add_done_callback(lambda _: give_back(arena))


@dataclass
class Survey:
    """What a state dict is made of, before anything is copied.

    Attributes:
        flat: its tensors and objects.
        structure: of them.
        changed: the layout must be made anew; also set when it must be so for another rank's sake.
        started: when `survey` was called (`time.perf_counter`).
        wait_until: monotonic seconds, beyond which `take` must not wait for anybody (`max_stall_s`).
    """

    flat: FlatState
    structure: Structure
    changed: bool
    started: float
    wait_until: float = math.inf


class Stager(ABC):
    """Takes the snapshot of a state dict, so that training may go on.

    A stager of one's own derives from this, takes its settings in `__init__`, and defines `take`. The factory calls
    `connect` with what the rest of the graph decides, before the first save.
    """

    #: False: the writer reads the live tensors, so the trainer has to wait for it (`caller=inline`).
    takes_snapshot: ClassVar[bool] = True
    #: Seconds that a save may keep training waiting, where there is such a limit; set by the factory.
    max_stall: float | None = None

    def connect(self, writer: Writer, *, ranks: Coordinator, shared: bool, timeout: float) -> None:
        """Learn the rest of the graph.

        Args:
            writer: lays out the image.
            ranks: whose image it is, and who else stores the same things.
            shared: another process writes, so the memory must be visible to it.
            timeout: seconds that a snapshot may wait for memory that is still being written, and for other ranks.
        """
        self._writer = writer
        self._ranks = ranks
        self._shared = shared
        self._timeout = timeout
        self._structure: Structure | None = None
        self._plan: FormatPlan | None = None
        self._selection: Selection | None = None
        self._plans = 0
        self._lock = threading.Lock()

    def survey(self, state_dict: Mapping[Any, Any]) -> Survey:
        """Look at a state dict, and whether it still has the structure that is planned for.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed, by key.
        """
        started = time.perf_counter()
        with collector_paused(), torch.no_grad():
            flat = flatten(state_dict, self._ranks.rank)
            known = self._structure
            if known is not None and known.matches(flat):
                return Survey(flat, known, False, started)
            return Survey(flat, Structure(flat), True, started)

    @abstractmethod
    def take(self, survey: Survey) -> Snapshot:
        """Take a snapshot of what was surveyed just now. `Snapshot.staged` tells when it is complete.

        With several ranks all call this together: where the structure changed on one, they plan together.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed, by key.
            CheckpointTimeoutError: no memory became free in time.
        """

    @property
    def busy(self) -> bool:
        """Whether the next snapshot would have to wait for an earlier save."""
        return False

    def wait_free(self, deadline: float) -> bool:
        """Wait until `busy` is False. Returns False when it still is at `deadline` (monotonic seconds)."""
        return not self.busy

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep `optimizer` from changing weights that are still being copied. Nothing to do for most stagers."""

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when every tensor may be changed. At once for stagers that are done when `take` returns."""

    def prewarm(self, state_dict: Mapping[Any, Any]) -> None:
        """Plan for a state dict of this structure, and take the memory, so that the first save costs what others do."""
        self._plan_for(self._surveyed_together(state_dict))

    def close(self) -> None:
        """Free the memory that no save uses; the rest is freed when its save ends."""

    def _surveyed_together(self, state_dict: Mapping[Any, Any]) -> Survey:
        """A survey outside of a save, after which all ranks know whether they have to plan."""
        survey = self.survey(state_dict)
        self._plans += 1
        deadline = time.monotonic() + self._timeout
        survey.changed = self._ranks.pool(f"survey/{self._plans}", survey.changed, any, deadline)
        return survey

    def _plan_for(self, survey: Survey) -> tuple[FormatPlan, FlatState]:
        """The plan for what this rank stores, and that part of the state: the last plan, or a new one."""
        with self._lock:
            if survey.changed:
                started = time.perf_counter()
                known, self._structure = self._plan is not None, None
                selection = self._select(survey)
                mine = survey.structure if selection is None else Structure(selection.of(survey.flat))
                self._plan = self._writer.plan(mine, self._ranks.rank)
                # Only now: a plan that failed must be made again next time.
                self._structure, self._selection = survey.structure, selection
                logger.info(
                    "planned %d tensors and %d objects in %.2f s%s",
                    len(mine.tensor_paths),
                    len(mine.object_paths),
                    time.perf_counter() - started,
                    ": the structure changed" if known else "",
                )
            if self._plan is None:
                raise CheckpointError("A snapshot was asked for before its state was surveyed.")
            return self._plan, survey.flat if self._selection is None else self._selection.of(survey.flat)

    def _select(self, survey: Survey) -> Selection | None:
        """Agree with the other ranks who stores what; None: this rank stores all that it has."""
        if self._ranks.world_size == 1 or not self._writer.shared:
            return None
        self._plans += 1
        deadline = min(time.monotonic() + self._timeout, survey.wait_until)
        mine = self._ranks.deal(f"plan/{self._plans}", holdings(survey.structure), share_out, deadline)
        return Selection(survey.structure, mine)


class ArenaStager(Stager):
    """A stager that copies into leased arenas.

    Args:
        arenas: how many saves may be in flight, each with its own copy of the state in host memory.

    Raises:
        CheckpointConfigError: `arenas` is less than 1.
    """

    def __init__(self, arenas: int = 1) -> None:
        if arenas < 1:
            raise CheckpointConfigError(f"checkpoint.stager.arenas must be at least 1, got {arenas}.")
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
                self._copy(snapshot, arena, flat, arena.slots(plan.layout), sources_of(plan.layout, flat.tensors))
            except BaseException:
                snapshot.release()
                raise
        return snapshot

    @abstractmethod
    def _copy(
        self,
        snapshot: Snapshot,
        arena: Arena,
        flat: FlatState,
        slots: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        """Copy `sources` into `slots`, pairwise, and settle `snapshot.staged` now or later."""

    def prewarm(self, state_dict: Mapping[Any, Any]) -> None:
        """Plan, and fill every arena once, so that its pages exist before the first save."""
        plan, flat = self._plan_for(self._surveyed_together(state_dict))
        plan.seal(flat.objects)
        arenas: list[Arena] = []
        try:
            for _ in range(self._arenas):
                arenas.append(self._pool.lease(plan.layout.arena_bytes, self._timeout))
            with torch.no_grad():
                sources = sources_of(plan.layout, flat.tensors)
                for arena in arenas:
                    self._warm(arena, plan.layout, flat, arena.slots(plan.layout), sources)
        finally:
            for arena in arenas:
                self._pool.give_back(arena)

    def _warm(
        self,
        arena: Arena,
        layout: Layout,
        flat: FlatState,
        slots: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        """Fill an arena that no save uses, as `_copy` will."""
        for slot in slots:
            slot.zero_()

    def close(self) -> None:
        """Free the arenas."""
        self._pool.close()
