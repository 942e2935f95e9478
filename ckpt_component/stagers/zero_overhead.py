"""`zero_overhead`: `take` returns at once, and the copy runs beside forward and backward.

The fence keeps the snapshot whole: no optimizer step begins before the copy has ended. What forward itself may change
(buffers such as BatchNorm's) is copied before `take` returns. Version counters are compared at the end, so a tensor
that changed all the same fails the save by name.

In host memory one thread copies, a few megabytes at a time, so that the other cores are training's; a thread that
reaches the fence before the copy is done helps with as many threads as torch has. What a device buffer takes needs no
fence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from functools import partial
from typing import Any, ClassVar

import torch

from ..errors import CheckpointTimeoutError
from ..image.arena import Slots
from ..image.copy import CopyTasks
from ..options import DEVICE_BUFFER_BYTES
from .background_copy import BackgroundCopy
from .copy_split import CopySplit
from .device_buffer import DeviceBuffer
from .optimizers import optimizers_in
from .overlap import OverlapMonitor
from .shared_memory import ArenaFill, PinnedStager, Settle


class ZeroOverheadStager(PinnedStager):
    """Overlaps the copy with training.

    Args:
        arenas: how many saves may be in flight, each with its own copy of the state in host memory.
        device_buffer_bytes: the most memory of each CUDA device that a snapshot may take there, by one copy in the
            order of the trainer's stream. What fits into it needs no fence: it may be changed as soon as `take` has
            returned. 0: none.

    Raises:
        CheckpointConfigError: `arenas` is not from 1 to 16, or `device_buffer_bytes` less than 0.
    """

    option: ClassVar[str] = "zero_overhead"

    def __init__(self, arenas: int = 2, device_buffer_bytes: int = 0) -> None:
        super().__init__(arenas)
        DEVICE_BUFFER_BYTES.check("checkpoint.stager.device_buffer_bytes", device_buffer_bytes)
        self._buffer = DeviceBuffer(device_buffer_bytes)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._hooks: list[Any] = []
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-stage")
        # A thread of its own: the next snapshot's fence must not wait until the last one has left the device.
        self._drain_thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-drain")
        self._pending: list[BackgroundCopy] = []
        self._pending_lock = threading.Lock()
        self._overlap = OverlapMonitor()

    def guard(self, optimizer: Any) -> None:
        """Make `optimizer.step()` wait until the running copy has ended; see `Stager.guard`.

        It also tells the stager which tensors only the optimizer changes; all others are copied before `take` returns.
        """
        for each in optimizers_in(optimizer):
            if not any(guarded is each for guarded in self._optimizers):
                self._optimizers.append(each)
                self._hooks.append(each.register_step_pre_hook(self._before_step))

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when every tensor may be changed.

        An error of the copy is not raised here: it is the save's own, and comes with its futures. So does the error of
        a snapshot that is thrown away, so that training waits no longer than `max_stall_s`.

        Raises:
            CheckpointTimeoutError: the copy did not end within `timeout` seconds (default: timeouts.stage).
        """
        limit, may_discard = self._timeout if timeout is None else timeout, False
        if timeout is None and self._max_stall is not None:
            limit, may_discard = min(limit, self._max_stall), True
        until = time.monotonic() + limit
        with self._pending_lock:
            self._pending = [copy for copy in self._pending if not copy.done.done()]
            pending = [copy for copy in self._pending if not may_discard or copy.discarded is None]
        for copy in pending:
            copy.help(until)
        left = max(until - time.monotonic(), 0)
        if wait_futures([copy.done for copy in pending], timeout=left).not_done:
            if not may_discard:
                raise CheckpointTimeoutError(f"A snapshot was still being copied after {limit:g} s (timeouts.stage).")
            for copy in pending:
                copy.discard(
                    f"The snapshot was thrown away, because it was still being copied after {limit:g} s, when the "
                    "optimizer had to change the weights (checkpoint.max_stall_s)."
                )

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.wait_staged()
        if optimizer is self._optimizers[0]:
            self._overlap.stepped(time.monotonic())

    def _fill(self, fill: ArenaFill, settle: Settle) -> None:
        buffered = self._buffer.acquire()
        try:
            split = self._split(fill, buffered)
            if buffered and not split.buffered:
                self._buffer.release()
                buffered = False
            if buffered:
                # First, so that what the fence waits for is copied after it.
                self._buffer.fill(fill.sources)
                settle = partial(self._drain_later, fill.slots, settle)
            self._copy(fill, split, buffered, settle)
        except BaseException:
            if buffered:
                self._buffer.release()
            raise

    def _split(self, fill: ArenaFill, buffered: bool) -> CopySplit:
        """How a state is split for an arena; made anew only when it could be another."""
        split: CopySplit | None = fill.slots.plans.get(buffered)
        if (
            split is None
            or (buffered and split.buffered is not self._buffer.numbers)
            or not split.fits(fill.flat, self._optimizers)
        ):
            split = CopySplit(fill, self._optimizers, self._buffer if buffered else None)
            self._prepare(fill.arena, next((source.device for source in fill.sources if source.is_cuda), None))
            fill.slots.plans[buffered] = split
        return split

    def _copy(self, fill: ArenaFill, split: CopySplit, buffered: bool, settle: Settle) -> None:
        """Copy what the device buffer has not taken, and see to it that the snapshot is completed."""
        threads = torch.get_num_threads()
        CopyTasks(split.now, fill.sources, fill.addresses).finish(threads)
        # Overlap is judged by whole copies alone: part of one, beside a drain, is no measure of it.
        if buffered:
            self._overlap.beside_other()
        if self._overlap.awaits or (not buffered and self._overlap.wants_trial):
            seconds = _copy_now(split, fill)
            if not buffered:
                self._overlap.awaited(seconds)
            settle(None)
        elif not split.later.numbers:
            settle(None)
        else:
            # Addresses are looked up when it copies: a tensor may be given other memory before that.
            copy = BackgroundCopy(fill.flat, split.watched, CopyTasks(split.later, fill.sources))
            with self._pending_lock:
                self._pending.append(copy)
            if not buffered:
                self._overlap.began(fill.slots.layout.payload_bytes)
            self._copy_thread.submit(copy.run, settle)

    def _drain_later(self, slots: Slots, settle: Settle, error: BaseException | None) -> None:
        """The copies under the fence have ended; what lies in the device buffer follows, unless one of them failed."""
        try:
            self._drain_thread.submit(self._drain, slots, settle, error)
        except RuntimeError:  # close() did not wait for as long as the copy took
            self._drain(slots, settle, error)

    def _drain(self, slots: Slots, settle: Settle, error: BaseException | None) -> None:
        if error is None:
            try:
                self._buffer.drain(slots)
            except Exception as failure:
                error = failure
        self._buffer.release()
        settle(error)

    def _warm(self, fill: ArenaFill) -> None:
        split = self._split(fill, False)
        CopyTasks(split.now, fill.sources, fill.addresses).finish(torch.get_num_threads())
        _copy_now(split, fill)
        self._overlap.awaited(_copy_now(split, fill))  # with its pages there: what an awaited copy costs
        if self._buffer.acquire():
            try:
                if self._split(fill, True).buffered:
                    self._buffer.fill(fill.sources)
                    self._buffer.drain(fill.slots)
            finally:
                self._buffer.release()

    def prewarm(self, state_dict: Mapping[Any, Any]) -> None:
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
            self._optimizers.clear()
            self._copy_thread.shutdown(wait=False)
            self._drain_thread.shutdown(wait=False)
            self._buffer.close()
            super().close()


def _copy_now(split: CopySplit, fill: ArenaFill) -> float:
    """Copy with all threads what otherwise is copied beside training. Returns the seconds that it took."""
    started = time.monotonic()
    CopyTasks(split.later, fill.sources, fill.addresses).finish(torch.get_num_threads())
    return time.monotonic() - started
