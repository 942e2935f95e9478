"""The stager `zero_overhead`: `take` returns at once, and the copy overlaps with forward and backward.

A fence keeps the snapshot consistent: no optimizer step begins before the copy has ended. Tensors that forward may
change (buffers such as BatchNorm's) are copied before `take` returns. Version counters are compared at the end, so a
tensor that changed in spite of that fails the save, with its name.

One thread copies in host memory, a few megabytes at a time, and leaves the other cores to training; a thread that
reaches the fence before the copy is done helps with all of torch's threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from ..core.image.copy import CopyPlan, CopyTasks
from ..core.lane import Lane
from ..core.outside import OUTSIDE, Future, Outside
from ..errors import CheckpointStallError, CheckpointTimeoutError, TornSnapshotError
from ..state.flatten import FlatState
from ..state.paths import key_of
from ..state.shards import dense_parts
from .base import StatePlan, optimizers_in
from .shared_memory import ArenaFill, PinnedStager, Settle


class CopySplit:
    """How states of one structure are split for one arena.

    Args:
        fill: the arena, and a state
        optimizers: the guarded optimizers, which wait at the fence

    Attributes:
        now: the copies made at once
        later: the copies made in the background, until the fence
        watched: numbers of the tensors that must not change before the fence
    """

    def __init__(self, fill: ArenaFill, optimizers: Collection[torch.optim.Optimizer]) -> None:
        tensor_of = fill.slots.layout.tensor_of
        self._guarded = set(map(weakref.ref, optimizers))
        self._pointers = fill.flat.pointers
        self._proofs = fill.proofs
        #: For every tensor, whether its copy may wait.
        self._late = late = _changed_by_optimizers_alone(fill.flat, optimizers)
        numbers = fill.without_proofs(range(len(tensor_of)))
        # What forward and optimizers left alone since the last save is hashed in the background too.
        buffers = _pointers(_module_buffers(fill.flat)) if fill.proofs else set()
        at_once, waiting = dict[int, list[int]](), dict[int, list[int]]()
        watched = {number for number, waits in enumerate(late) if waits}
        for file, items in fill.proofs.items():
            tensors = {tensor_of[item] for item in items}
            counted = all(late[tensor] or fill.flat.counts_changes(tensor) for tensor in tensors)
            if counted and buffers.isdisjoint(map(fill.flat.pointers.__getitem__, tensors)):
                waiting[file] = items
                watched |= tensors
            else:
                at_once[file] = items
        self.now = CopyPlan(fill.slots, fill.sources, [item for item in numbers if not late[tensor_of[item]]], at_once)
        self.later = CopyPlan(fill.slots, fill.sources, [item for item in numbers if late[tensor_of[item]]], waiting)
        self.watched = sorted(watched)

    def fits(self, fill: ArenaFill, optimizers: Collection[torch.optim.Optimizer]) -> bool:
        """Whether the split still fits after tensors have moved, such as an RNG state created for every save."""
        flat = fill.flat
        if self._guarded != set(map(weakref.ref, optimizers)) or self._proofs != fill.proofs:
            return False
        before, self._pointers = self._pointers, flat.pointers
        if before == flat.pointers:
            return True
        late = [
            number
            for number, (waits, old, new) in enumerate(zip(self._late, before, flat.pointers, strict=True))
            if waits and old != new  # anything may be copied at once
        ]
        if optimizers:
            return not late
        buffers = _pointers(_module_buffers(flat)) if late else set()
        return not any(flat.pointers[number] in buffers or not _has_counter(flat, number) for number in late)


def _changed_by_optimizers_alone(flat: FlatState, optimizers: Collection[torch.optim.Optimizer]) -> list[bool]:
    """For every tensor, whether its copy may wait until the next optimizer step.

    With guarded optimizers, their parameters and their state may wait. Without, all but DTensors and the buffers of
    modules in the state may, and version counters show most of what the caller changes too early.
    """
    owned = _pointers(_optimizer_tensors(optimizers))
    buffers = _pointers(_module_buffers(flat))
    if optimizers:
        return [
            pointer in owned and not tensor.is_inference()
            for tensor, pointer in zip(flat.tensors, flat.pointers, strict=True)
        ]
    return [pointer not in buffers and _has_counter(flat, number) for number, pointer in enumerate(flat.pointers)]


def _has_counter(flat: FlatState, number: int) -> bool:
    """Whether a version counter shows changes of a tensor; an inference tensor has none."""
    return flat.counts_changes(number) and not flat.tensors[number].is_inference()


def _optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _module_buffers(flat: FlatState) -> Iterable[torch.Tensor]:
    for _, value in flat.stateful:
        if isinstance(value, torch.nn.Module):
            yield from value.buffers()


def _pointers(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {part.data_ptr() for tensor in tensors for part in dense_parts(tensor)}


class BackgroundCopy(Future[None]):
    """A copy in the background. As a future it is done when the copy has ended; whoever sees that is past the fence.

    Args:
        flat: the state
        watched: numbers of the tensors that must not change before the fence
        tasks: the copy; no tensor may have changed since it was created
        outside: by which it is waited for

    Attributes:
        discarded: why the snapshot is discarded, once it is
    """

    def __init__(self, flat: FlatState, watched: Sequence[int], tasks: CopyTasks, outside: Outside = OUTSIDE) -> None:
        super().__init__()
        self._outside = outside
        self.discarded: CheckpointStallError | None = None
        self._paths = flat.tensor_paths
        dtensors = [number for number in watched if not flat.counts_changes(number)] if flat.placed else []
        self._watched = [*watched, *dtensors]
        self._tensors = [flat.tensors[number] for number in watched] + [flat.placed[number] for number in dtensors]
        self._versions = [tensor._version for tensor in self._tensors]
        self._tasks: CopyTasks | None = tasks
        self._look_lock = outside.lock()
        self._torn: TornSnapshotError | None = None

    def done(self) -> bool:
        """Whether the copy has ended; the caller may then change the tensors."""
        ended = super().done()
        if ended:
            self._look()
        return ended

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end of the copy; the caller may then change the tensors.

        Raises:
            TornSnapshotError: a tensor changed before
        """
        self._outside.wait_for([self], timeout)
        super().result(0)
        self._look()
        if self._torn is not None:
            raise self._torn

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait like `result`. Returns its error, or None."""
        self._outside.wait_for([self], timeout)
        error = super().exception(0)
        if error is None:
            self._look()
        return error or self._torn

    def help(self, until: float) -> None:
        """Copy the rest with all threads, because training is waiting; not beyond `until` (`Outside.now`)."""
        tasks = self._tasks
        if tasks is not None:
            tasks.drain(until, torch.get_num_threads())

    def discard(self, reason: str) -> None:
        """Let training change the tensors before the copy has ended; the snapshot fails with this text."""
        self.discarded = CheckpointStallError(reason)
        tasks = self._tasks
        if tasks is not None:
            tasks.stop()

    def run(self, settle: Callable[[BaseException | None], None]) -> None:
        """Copy the rest with this thread.

        Args:
            settle: called when all is copied, with the error that makes the snapshot unusable, or None
        """
        error = self._finish()
        try:
            settle(error)
        finally:
            self._tasks = None
            if error is None:
                self.set_result(None)
            else:
                self._tensors = []
                self.set_exception(error)

    def _finish(self) -> BaseException | None:
        try:
            if self._tasks is not None:
                self._tasks.finish(threads=1)
            return self.discarded or self._changes()
        except Exception as failure:
            return failure

    def _look(self) -> None:
        """Decide whether the snapshot is sound, if it is not decided: no tensor changed until now."""
        with self._look_lock:
            if self._tensors:
                self._torn = self._changes()
                self._tensors = []  # they need not live any longer

    def _changes(self) -> TornSnapshotError | None:
        """Return an error that names the tensors changed since the copy began, or None."""
        versions = [tensor._version for tensor in self._tensors]
        if versions == self._versions:
            return None
        changed = sorted(
            {
                number
                for number, before, after in zip(self._watched, self._versions, versions, strict=True)
                if before != after
            }
        )
        keys = [key_of(self._paths[number]) for number in changed]
        named = ", ".join(f"'{key}'" for key in keys[:3]) + (f" and {len(keys) - 3} more" if keys[3:] else "")
        return TornSnapshotError(
            f"{named} changed before anything had waited for the copy of the snapshot, so it was thrown away. Call "
            "guard(optimizer) once before training, or wait_staged() before anything changes the state."
        )


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
