"""What a stager is, and what all that copy into an arena share."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import torch

from ..config.errors import CheckpointConfigError
from ..image.arena import Arena, ArenaPool
from ..image.layout import Layout, Structure, sources_of
from ..image.tree import FlatState, flatten
from ..writers.base import FormatPlan, Sealed, Writer
from ..writers.byte_io import ByteSource, MemorySource

logger = logging.getLogger(__name__)


class Snapshot:
    """A state dict at one moment, laid out for writing. Owned by the save; `release` must be called once it ended.

    Attributes:
        layout: what lies where.
        sealed: the constant tables, and the encoded objects of this save.
        source: the bytes of the image; complete once `staged` is done.
        arena: the leased memory, or None where there is none.
        started: when `stage` was called (`time.perf_counter`).
        staged: done when training may change every tensor again; has the error when staging failed.
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
        """Return the arena to its pool; the second call does nothing."""
        arena, self.arena = self.arena, None
        if arena is not None and self._give_back is not None:
            self._give_back(arena)


class Stager(ABC):
    """Takes the snapshot of a state dict, so that training may go on.

    A stager of one's own derives from this and takes its settings in `__init__`. The factory then calls `connect`
    with what the rest of the graph decides, before the first `stage`.
    """

    #: False: the writer reads the live tensors, so the trainer has to wait for it (`caller=inline`).
    takes_snapshot: ClassVar[bool] = True

    def connect(self, writer: Writer, *, rank: int, shared: bool, timeout: float) -> None:
        """Learn the rest of the graph.

        Args:
            writer: lays out the image.
            rank: whose image it is.
            shared: another process writes, so the memory must be visible to it.
            timeout: seconds that `stage` may wait for memory that is still being written.
        """
        self._writer = writer
        self._rank = rank
        self._shared = shared
        self._timeout = timeout
        self._structure: Structure | None = None
        self._plan: FormatPlan | None = None
        self._lock = threading.Lock()

    @abstractmethod
    def stage(self, state_dict: Mapping[Any, Any]) -> Snapshot:
        """Take a snapshot. Returns when the variant says so; `Snapshot.staged` tells when it is complete.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed, by key.
            CheckpointTimeoutError: no memory became free in time.
        """

    @property
    def busy(self) -> bool:
        """Whether the next `stage` would have to wait for an earlier save."""
        return False

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep `optimizer` from changing weights that are still being copied. Nothing to do for most stagers."""

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when every tensor may be changed. At once for stagers that are done when `stage` returns."""

    def prewarm(self, state_dict: Mapping[Any, Any]) -> None:
        """Plan for a state dict of this structure, and take the memory, so that the first save costs what others do."""
        self._plan_for(flatten(state_dict))

    def close(self) -> None:
        """Free the memory that no save uses; the rest is freed when its save ends."""

    def _plan_for(self, flat: FlatState) -> FormatPlan:
        """The plan of this structure: the last one, or a new one when anything differs."""
        with self._lock:
            if self._plan is None or self._structure is None or not self._structure.matches(flat):
                started = time.perf_counter()
                known = self._plan is not None
                self._structure = Structure(flat)
                self._plan = self._writer.plan(self._structure, self._rank)
                logger.info(
                    "planned %d tensors and %d objects in %.2f s%s",
                    len(flat.tensors),
                    len(flat.objects),
                    time.perf_counter() - started,
                    ": the structure changed" if known else "",
                )
            return self._plan


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection meanwhile: a walk over 20,000 tensors would set off full ones, 0.2 s each (measured)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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

    def connect(self, writer: Writer, *, rank: int, shared: bool, timeout: float) -> None:
        """Learn the rest of the graph; see `Stager.connect`."""
        super().connect(writer, rank=rank, shared=shared, timeout=timeout)
        self._pool = ArenaPool(self._arenas, shared=shared)

    @property
    def busy(self) -> bool:
        """Whether all arenas are being written."""
        return self._pool.busy

    def stage(self, state_dict: Mapping[Any, Any]) -> Snapshot:
        """Copy everything into an arena; see `Stager.stage`."""
        started = time.perf_counter()
        with _collector_paused(), torch.no_grad():
            flat = flatten(state_dict)
            plan = self._plan_for(flat)
            sealed = plan.seal(flat.objects)
            arena = self._pool.lease(plan.layout.arena_bytes, self._timeout)
            snapshot = Snapshot(plan.layout, sealed, MemorySource(arena.memory), started, arena, self._pool.give_back)
            try:
                self._copy(snapshot, flat, arena.slots(plan.layout), sources_of(plan.layout, flat.tensors))
            except BaseException:
                snapshot.release()
                raise
        return snapshot

    @abstractmethod
    def _copy(
        self, snapshot: Snapshot, flat: FlatState, slots: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        """Copy `sources` into `slots`, pairwise, and settle `snapshot.staged` now or later."""

    def prewarm(self, state_dict: Mapping[Any, Any]) -> None:
        """Plan, and fill one arena, so that its pages exist before the first save."""
        flat = flatten(state_dict)
        plan = self._plan_for(flat)
        arena = self._pool.lease(plan.layout.arena_bytes, self._timeout)
        try:
            with torch.no_grad():
                for slot in arena.slots(plan.layout):
                    slot.zero_()
        finally:
            self._pool.give_back(arena)

    def close(self) -> None:
        """Free the arenas."""
        self._pool.close()
