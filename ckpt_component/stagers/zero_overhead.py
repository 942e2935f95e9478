"""`zero_overhead`: `take` returns at once, and the copy runs beside forward and backward.

The fence keeps the snapshot whole: no optimizer step begins before the copy has ended. What forward itself may
change (buffers such as BatchNorm's) is copied before `take` returns. Version counters are compared at the end, so a
tensor that changed all the same fails the save by name.

In host memory one thread copies, a few megabytes at a time, so that the other cores are training's; whoever comes to
the fence before it is done helps with as many threads as torch has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..errors import CheckpointStallError, CheckpointTimeoutError, TornSnapshotError
from ..image.arena import Arena
from ..image.host_copy import Portions
from ..image.layout import Layout
from ..image.shards import local_part
from ..image.tree import FlatState, key_of
from .base import ArenaStager, Snapshot
from .copying import ArenaCopies, CopyPlan, copy_now
from .overlap import OverlapWatch
from .pinned import PageLock


class ZeroOverheadStager(ArenaStager):
    """Overlaps the copy with training.

    Args:
        arenas: how many saves may be in flight, each with its own copy of the state in host memory.
    """

    option: ClassVar[str] = "zero_overhead"

    def __init__(self, arenas: int = 2) -> None:
        super().__init__(arenas)
        self._now_copies = ArenaCopies()
        self._later_copies = ArenaCopies()
        self._parts: dict[int, _Parts] = {}
        self._page_lock = PageLock("zero_overhead")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-stage")
        self._pending: list[_Copying] = []
        self._pending_lock = threading.Lock()
        self._overlap = OverlapWatch()
        self._guarded: list[torch.optim.Optimizer] = []
        self._hooks: list[Any] = []

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make `optimizer.step()` wait until the running copy has ended.

        It also tells the stager which tensors only the optimizer changes; all others are copied before `take` returns.
        """
        if not any(known is optimizer for known in self._guarded):
            self._guarded.append(optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._parts.clear()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when every tensor may be changed.

        An error of the copy is not raised here: it is the save's own, and comes with its futures. So does the error of
        a snapshot that is thrown away, so that training waits no longer than `max_stall_s`.

        Raises:
            CheckpointTimeoutError: the copy did not end within `timeout` seconds (default: timeouts.stage).
        """
        limit = self._timeout if timeout is None else timeout
        bound = timeout is None and self.max_stall is not None
        if bound and self.max_stall is not None:
            limit = min(limit, self.max_stall)
        until = time.monotonic() + limit
        with self._pending_lock:
            self._pending = [copying for copying in self._pending if not copying.done.done()]
            pending = [copying for copying in self._pending if not bound or copying.given_up is None]
        for copying in pending:
            copying.help(until)
        left = max(until - time.monotonic(), 0)
        if wait_futures([copying.done for copying in pending], timeout=left).not_done:
            if not bound:
                raise CheckpointTimeoutError(f"A snapshot was still being copied after {limit:g} s (timeouts.stage).")
            for copying in pending:
                copying.give_up(
                    f"The snapshot was thrown away, because it was still being copied after {limit:g} s, when the "
                    "optimizer had to change the weights (checkpoint.max_stall_s)."
                )

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.wait_staged()
        if optimizer is self._guarded[0]:
            self._overlap.stepped(time.monotonic())

    def _copy(
        self,
        snapshot: Snapshot,
        arena: Arena,
        flat: FlatState,
        slots: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        parts = self._parts_of(snapshot.layout, arena, flat, slots)
        now, later = parts.now.of(sources), parts.later.of(sources)
        late = self._later_copies.plan(arena.number, parts.later.slots, later)
        self._page_lock.apply(arena, late.device)
        copy_now(self._now_copies.plan(arena.number, parts.now.slots, now), now)
        if self._overlap.awaits or self._overlap.wants_trial:
            self._copy_awaited(snapshot, late, later)
            return
        copying = _Copying(snapshot, flat, parts.watched)
        # CUDA copies are started from this thread, so that they are ordered after the trainer's work so far.
        copying.portions, events = late.start(later)
        with self._pending_lock:
            self._pending.append(copying)
        self._overlap.began(snapshot.layout.payload_bytes)
        self._thread.submit(self._finish, copying, copying.portions, events)

    def _copy_awaited(self, snapshot: Snapshot, plan: CopyPlan, sources: Sequence[torch.Tensor]) -> None:
        started = time.monotonic()
        copy_now(plan, sources)
        self._overlap.awaited(time.monotonic() - started)
        snapshot.mark_staged()

    def _finish(self, copying: _Copying, portions: Portions, events: Sequence[torch.cuda.Event]) -> None:
        error: BaseException | None = None
        try:
            portions.finish(threads=1)
            for event in events:
                event.synchronize()
            error = copying.given_up or copying.torn()
        except Exception as failure:
            error = failure
        copying.settle(error)

    def _parts_of(self, layout: Layout, arena: Arena, flat: FlatState, slots: Sequence[torch.Tensor]) -> _Parts:
        """What is copied at once and what may wait; thought over again only when it could be something else."""
        pointers = list(map(torch.Tensor.data_ptr, flat.tensors))
        known = self._parts.get(arena.number)
        if known is not None and known.slots is slots and self._still_fit(known, flat, pointers):
            known.pointers = pointers
            return known
        late = self._changed_by_optimizers_alone(flat, pointers)
        stored = layout.stored
        now, later = _Part([], []), _Part([], [])
        for number, item in enumerate(layout.items):
            part = later if late[stored[item.stored].tensor] else now
            part.numbers.append(number)
            part.slots.append(slots[number])
        watched = [number for number, is_late in enumerate(late) if is_late]
        parts = self._parts[arena.number] = _Parts(slots, pointers, late, now, later, watched)
        return parts

    def _still_fit(self, parts: _Parts, flat: FlatState, pointers: Sequence[int]) -> bool:
        """Whether no tensor that moved, such as an RNG state made anew for every save, belongs elsewhere now."""
        if parts.pointers == pointers:
            return True
        moved = [number for number, (a, b) in enumerate(zip(parts.pointers, pointers, strict=True)) if a != b]
        if self._guarded:
            return not any(parts.late[number] for number in moved)  # to copy at once is never wrong
        buffers = set(_pointers(_module_buffers(flat)))
        return all(
            parts.late[number] == (pointers[number] not in buffers and not flat.tensors[number].is_inference())
            for number in moved
        )

    def _changed_by_optimizers_alone(self, flat: FlatState, pointers: Sequence[int]) -> list[bool]:
        """For every tensor: may its copy wait until the next optimizer step?

        With guarded optimizers: their parameters and their state. Without: everything but the buffers of modules in
        the state, and the version check catches what the caller changes too early.
        """
        owned = set(_pointers(_optimizer_tensors(self._guarded)))
        buffers = set(_pointers(_module_buffers(flat)))
        late = []
        for tensor, pointer in zip(flat.tensors, pointers, strict=True):
            known = pointer in owned if self._guarded else pointer not in buffers
            late.append(known and not tensor.is_inference())  # an inference tensor has no version
        return late

    def _warm(
        self,
        arena: Arena,
        layout: Layout,
        flat: FlatState,
        slots: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        parts = self._parts_of(layout, arena, flat, slots)
        for part, copies in ((parts.now, self._now_copies), (parts.later, self._later_copies)):
            tensors = part.of(sources)
            plan = copies.plan(arena.number, part.slots, tensors)
            self._page_lock.apply(arena, plan.device)
            copy_now(plan, tensors)
        # Now that its pages are there: what a copy costs that training waits for.
        started = time.monotonic()
        copy_now(plan, tensors)
        self._overlap.awaited(time.monotonic() - started)

    def prewarm(self, state_dict: Any) -> None:
        """As for every arena; no copy may be running."""
        self.wait_staged(self._timeout)
        super().prewarm(state_dict)

    def close(self) -> None:
        """Wait for the running copy (bounded by timeouts.stage), take the hooks off, and free the arenas."""
        try:
            self.wait_staged(self._timeout)
        finally:
            while self._hooks:
                self._hooks.pop().remove()
            self._guarded.clear()
            self._thread.shutdown(wait=False)
            self._parts.clear()
            self._now_copies.forget()
            self._later_copies.forget()
            super().close()


@dataclass(frozen=True)
class _Part:
    """Some of the items: their numbers, and their slots."""

    numbers: list[int]
    slots: list[torch.Tensor]

    def of(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Their tensors."""
        return list(sources) if len(self.numbers) == len(sources) else [sources[number] for number in self.numbers]


@dataclass
class _Parts:
    """How a state is divided for one arena.

    Attributes:
        slots: the arena's, for one structure.
        pointers: where the tensors lay.
        late: for every tensor whether it may wait.
        now: copied before `take` returns.
        later: copied beside training.
        watched: numbers of the tensors in `later`.
    """

    slots: Sequence[torch.Tensor]
    pointers: list[int]
    late: list[bool]
    now: _Part
    later: _Part
    watched: list[int]


class _Copying:
    """One copy on its way: what it needs to tell whether a tensor changed under it."""

    def __init__(self, snapshot: Snapshot, flat: FlatState, watched: Sequence[int]) -> None:
        self.done: Future[None] = Future()
        self.portions: Portions | None = None
        self._snapshot = snapshot
        self._paths = flat.tensor_paths
        self._numbers = watched
        tensors = flat.tensors
        self._tensors = tensors if len(watched) == len(tensors) else [tensors[number] for number in watched]
        self._versions = [tensor._version for tensor in self._tensors]
        self.given_up: CheckpointStallError | None = None

    def help(self, until: float) -> None:
        """Copy what is left with all threads, because training waits for it now; not beyond `until` (monotonic)."""
        portions = self.portions
        if portions is not None:
            portions.help(torch.get_num_threads(), until)

    def give_up(self, text: str) -> None:
        """Let training change the tensors although the copy has not ended; it will fail with this text."""
        self.given_up = CheckpointStallError(text)
        portions = self.portions
        if portions is not None:
            portions.stop()

    def torn(self) -> TornSnapshotError | None:
        """An error that names what changed since the copy began, or None."""
        versions = [tensor._version for tensor in self._tensors]
        if versions == self._versions:
            return None
        changed = [
            key_of(self._paths[number])
            for number, before, after in zip(self._numbers, self._versions, versions, strict=True)
            if before != after
        ]
        named = ", ".join(f"'{key}'" for key in changed[:3]) + (f" and {len(changed) - 3} more" if changed[3:] else "")
        return TornSnapshotError(
            f"{named} changed while the snapshot was being copied, so it was thrown away. Call guard(optimizer) once "
            "before training, or wait_staged() before anything changes the state."
        )

    def settle(self, error: BaseException | None) -> None:
        self._snapshot.mark_staged(error)
        # The tensors need not live longer than the copy; the arena goes back when the save ends.
        self._tensors, self.portions = [], None
        self.done.set_result(None)


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


def _pointers(tensors: Iterable[torch.Tensor]) -> Iterable[int]:
    return (local_part(tensor, "a tensor of the optimizer")[0].data_ptr() for tensor in tensors)
