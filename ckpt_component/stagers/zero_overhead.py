"""The stager `zero_overhead`: `take` returns at once, and the copy overlaps with forward and backward.

A fence keeps the snapshot consistent: no optimizer step begins before the copy has ended. Tensors that forward may
change (buffers such as BatchNorm's) are copied before `take` returns. Version counters are compared at the end, so a
tensor that changed in spite of that fails the save, with its name.

One thread copies in host memory, a few megabytes at a time, and leaves the other cores to training; a thread that
reaches the fence before the copy is done helps with all of torch's threads.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..core.image.copy import CopyTasks
from ..core.lane import Lane
from ..errors import CheckpointTimeoutError
from .background_copy import BackgroundCopy
from .base import StatePlan
from .copy_split import CopySplit
from .optimizers import optimizers_in
from .shared_memory import ArenaFill, PinnedStager, Settle


class ZeroOverheadStager(PinnedStager):
    """Overlaps the copy with training.

    Args:
        arenas: how many saves may be in flight, each with its own copy of the state in host memory

    Raises:
        CheckpointConfigError: `arenas` is not from 1 to 16
    """

    def __init__(self, arenas: int = 2) -> None:
        super().__init__(arenas)
        #: The guarded ones, which a training script may replace.
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []
        #: The copies of the saves that have not ended.
        self._pending: weakref.WeakSet[BackgroundCopy] = weakref.WeakSet()

    def _connected(self, *, shared: bool) -> None:
        super()._connected(shared=shared)
        self._outside = self._ranks.outside
        self._pending_lock = self._outside.lock()
        self._lane = Lane("ckpt-stage", self._outside)

    def guard(self, optimizer: Any) -> None:
        """Make `optimizer.step()` wait until the running copy has ended; see `Stager.guard`.

        The stager then also knows which tensors only the optimizer changes; it copies all others before `take` returns.
        """
        for each in optimizers_in(optimizer):
            if each not in self._optimizers:
                self._optimizers.add(each)
                self._hooks.append(each.register_step_pre_hook(self._before_step))

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until every tensor may be changed.

        An error of the copy is not raised here, but by the save's futures. So is the error of a snapshot that is
        discarded so that training waits no longer than `max_stall_s`.

        Raises:
            CheckpointTimeoutError: the copy did not end within `timeout` seconds (default: timeouts.stage)
        """
        limit, may_discard = self._timeout if timeout is None else timeout, False
        if timeout is None and self._max_stall is not None:
            limit, may_discard = min(limit, self._max_stall), True
        until = self._outside.now() + limit
        with self._pending_lock:
            pending = [copy for copy in self._pending if not may_discard or copy.discarded is None]
        for copy in pending:
            copy.help(until)
        self._outside.wait_for(pending, until - self._outside.now())
        late = [copy for copy in pending if not copy.done()]
        if late:
            if not may_discard:
                raise CheckpointTimeoutError(f"A snapshot was still being copied after {limit:g} s (timeouts.stage).")
            for copy in late:
                copy.discard(
                    f"The snapshot was thrown away, because it was still being copied after {limit:g} s, when the "
                    "optimizer had to change the weights (checkpoint.max_stall_s)."
                )

    def _before_step(self, *_: object) -> None:
        self.wait_staged()

    def _fill(self, fill: ArenaFill, settle: Settle) -> BackgroundCopy | None:
        split = self._split(fill)
        fill.tasks(split.now).finish(torch.get_num_threads())
        if split.later.is_empty:
            settle(None)
            return None
        # Addresses are looked up when it copies, because a tensor may get other memory before.
        copy = BackgroundCopy(fill.flat, split.watched, fill.tasks(split.later, at_once=False), self._outside)
        self._lane.submit(copy.run, settle)
        with self._pending_lock:  # only what the lane has accepted ends
            self._pending.add(copy)
        return copy

    def _split(self, fill: ArenaFill) -> CopySplit:
        """Return how a state is split for an arena; computed again only when that may have changed.

        Optimizers in the state are guarded here, as no version counter shows their steps with `fused=True`.
        """
        optimizers = [value for _, value in fill.flat.stateful if isinstance(value, torch.optim.Optimizer)]
        if optimizers:
            self.guard(optimizers)
        split: CopySplit | None = fill.slots.plans.get("split")
        if split is None or not split.fits(fill, self._optimizers):
            fill.slots.plans["split"] = split = CopySplit(fill, self._optimizers)
            self._prepare(fill.arena, next((source.device for source in fill.sources if source.is_cuda), None))
        return split

    def _warm(self, fill: ArenaFill) -> None:
        split = self._split(fill)
        for plan in (split.now, split.later):
            CopyTasks(plan, fill.sources, fill.addresses, outside=self._outside).finish(torch.get_num_threads())

    def prewarm(self, plan: StatePlan) -> None:
        """Prewarm all arenas, after the running copy has ended; see `Stager.prewarm`."""
        self.wait_staged(self._timeout)
        super().prewarm(plan)

    def close(self) -> None:
        """Wait for the running copy (bounded by timeouts.stage), remove the hooks, and free the memory."""
        try:
            self.wait_staged(self._timeout)
        finally:
            while self._hooks:
                self._hooks.pop().remove()
            self._optimizers.clear()
            self._lane.stop(cancel=False)
            super().close()
