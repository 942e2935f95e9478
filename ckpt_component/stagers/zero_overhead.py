"""`zero_overhead`: `take` returns at once, and the copy runs beside forward and backward.

The fence keeps the snapshot whole: no optimizer step begins before the copy has ended. What forward itself may
change (buffers such as BatchNorm's) is copied before `take` returns. Version counters are compared at the end, so a
tensor that changed all the same fails the save by name.

In host memory one thread copies, a few megabytes at a time, so that the other cores are training's; whoever comes to
the fence before it is done helps with as many threads as torch has. What is copied is written at once: training does
not wait for it, so nothing is lost when writing and copying share the memory's bandwidth. What a device buffer takes
needs no fence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..errors import CheckpointTimeoutError
from ..image.copy_progress import Reached
from ..options import DEVICE_BUFFER_BYTES
from ..writing.progress import Progress
from .arena_stager import ArenaStager, Filling
from .copying import ArenaCopies, copy_now
from .device_buffer import DeviceBuffer, Lease, Placement
from .division import Division, Divisions
from .fence import FencedCopy
from .overlap import OverlapWatch
from .pinned import PageLock
from .snapshot import Snapshot


class ZeroOverheadStager(ArenaStager):
    """Overlaps the copy with training.

    Args:
        arenas: how many saves may be in flight, each with its own copy of the state in host memory.
        device_buffer_bytes: the most memory of each CUDA device that a snapshot may take there, by one copy in the
            order of the trainer's stream. What fits into it needs no fence: it may be changed as soon as `take` has
            returned. 0: none.

    Raises:
        CheckpointConfigError: `arenas` or `device_buffer_bytes` is out of range.
    """

    option: ClassVar[str] = "zero_overhead"

    def __init__(self, arenas: int = 2, device_buffer_bytes: int = 0) -> None:
        super().__init__(arenas)
        DEVICE_BUFFER_BYTES.check("checkpoint.stager.device_buffer_bytes", device_buffer_bytes)
        self._now_copies = ArenaCopies()
        self._later_copies = ArenaCopies()
        self._buffer = DeviceBuffer(device_buffer_bytes)
        self._divisions = Divisions(self._buffer)
        self._page_lock = PageLock("zero_overhead")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-stage")
        # A thread of its own: the next snapshot's fence must not wait until the last one has left the device.
        self._drain_thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-drain")
        self._pending: list[FencedCopy] = []
        self._pending_lock = threading.Lock()
        self._overlap = OverlapWatch()
        self._hooks: list[Any] = []

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make `optimizer.step()` wait until the running copy has ended.

        It also tells the stager which tensors only the optimizer changes; all others are copied before `take` returns.
        """
        guarded = self._divisions.optimizers
        if not any(known is optimizer for known in guarded):
            guarded.append(optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._divisions.forget()

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
        if optimizer is self._divisions.optimizers[0]:
            self._overlap.stepped(time.monotonic())

    def _copy(self, filling: Filling, snapshot: Snapshot) -> None:
        lease = self._buffer.lease()
        try:
            division = self._divisions.of(filling, lease)
            self._page_lock.apply(filling.arena, division.device)
            drain = None
            if lease is not None and division.placement is not None:
                # First, so that what the fence waits for is copied after it, and not it after that.
                division.placement.fill(filling.sources)
                drain = _Drain(division.placement, filling.slots, lease)
            elif lease is not None:
                lease.give_back()
            self._copy_divided(filling, division, drain, snapshot)
        except BaseException:
            if lease is not None:
                lease.give_back()
            raise

    def _copy_divided(self, filling: Filling, division: Division, drain: _Drain | None, snapshot: Snapshot) -> None:
        """Copy what the device buffer has not taken, and see to it that the snapshot is completed."""
        key = filling.arena.number, drain is not None
        now, later = division.now.of(filling.sources), division.later.of(filling.sources)
        copy_now(self._now_copies.plan(key, division.now.slots, now), now)
        late = self._later_copies.plan(key, division.later.slots, later, _addresses(filling))
        # Overlap is judged by whole copies alone: part of one, beside a drain, is no measure of it.
        if drain is not None:
            self._overlap.beside_other()
        if self._overlap.awaits or (drain is None and self._overlap.wants_trial):
            started = time.monotonic()
            copy_now(late, later)
            if drain is None:
                self._overlap.awaited(time.monotonic() - started)
            self._complete(snapshot, drain, None)
        elif not later:
            self._complete(snapshot, drain, None)
        else:
            # Copies from a device are over at once, next to what a disk takes; those in host memory are not.
            follows = drain is None and late.device is None
            reached = _follow(filling, snapshot) if follows else None
            copying = FencedCopy(filling.flat, division.watched, late, later, reached)
            with self._pending_lock:
                self._pending.append(copying)
            if drain is None:
                self._overlap.began(filling.layout.payload_bytes)
            self._thread.submit(self._finish, copying, snapshot, drain)

    def _finish(self, copying: FencedCopy, snapshot: Snapshot, drain: _Drain | None) -> None:
        try:
            self._complete(snapshot, drain, copying.finish())
        finally:
            copying.open()

    def _complete(self, snapshot: Snapshot, drain: _Drain | None, error: BaseException | None) -> None:
        """The copies under the fence have ended. What lies in the device buffer follows, unless they were in vain."""
        if drain is None:
            snapshot.mark_staged(error)
        elif error is not None:
            drain.lease.give_back()
            snapshot.mark_staged(error)
        else:
            try:
                self._drain_thread.submit(self._drain, drain, snapshot)
            except RuntimeError as closed:  # close() did not wait for as long as the copy took
                drain.lease.give_back()
                snapshot.mark_staged(closed)

    def _drain(self, drain: _Drain, snapshot: Snapshot) -> None:
        error: BaseException | None = None
        try:
            drain.placement.drain(drain.targets)
        except Exception as failure:
            error = failure
        drain.lease.give_back()
        snapshot.mark_staged(error)

    def _warm(self, filling: Filling) -> None:
        division = self._divisions.of(filling, None)
        self._page_lock.apply(filling.arena, division.device)
        for part, copies in ((division.now, self._now_copies), (division.later, self._later_copies)):
            tensors = part.of(filling.sources)
            tracks = _addresses(filling) if part is division.later else ()
            plan = copies.plan((filling.arena.number, False), part.slots, tensors, tracks)
            copy_now(plan, tensors)
        # Now that its pages are there: what a copy costs that training waits for.
        started = time.monotonic()
        copy_now(plan, tensors)
        self._overlap.awaited(time.monotonic() - started)
        lease = self._buffer.lease()
        if lease is not None:
            try:
                placement = self._divisions.of(filling, lease).placement
                if placement is not None:
                    placement.fill(filling.sources)
                    placement.drain(filling.slots)
            finally:
                lease.give_back()

    def prewarm(self, state_dict: Any) -> None:
        """As for every arena; no copy may be running."""
        self.wait_staged(self._timeout)
        super().prewarm(state_dict)

    def close(self) -> None:
        """Wait for the running copy (bounded by timeouts.stage), take the hooks off, and free the memory.

        A snapshot that still lies in a device buffer is drained to its end; then that memory is freed too.
        """
        try:
            self.wait_staged(self._timeout)
        finally:
            while self._hooks:
                self._hooks.pop().remove()
            self._divisions.optimizers.clear()
            self._thread.shutdown(wait=False)
            self._drain_thread.shutdown(wait=False)
            self._divisions.forget()
            self._now_copies.forget()
            self._later_copies.forget()
            self._buffer.close()
            super().close()


def _addresses(filling: Filling) -> list[tuple[int, int]]:
    return [(filling.base + start, filling.base + end) for start, end in filling.tracks]


def _follow(filling: Filling, snapshot: Snapshot) -> Reached:
    """Let a writer begin with a snapshot while it is copied. Returns what is to be told how far it has come."""
    progress = snapshot.progress = Progress(filling.tracks)

    def reached(track: int, address: int) -> None:
        progress.reached(track, address - filling.base)

    return reached


@dataclass(frozen=True)
class _Drain:
    """A snapshot in the device buffer that is yet to be copied to the arena's slots."""

    placement: Placement
    targets: Sequence[torch.Tensor]
    lease: Lease
