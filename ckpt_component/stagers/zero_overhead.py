"""`zero_overhead`: `take` returns at once, and the copy runs beside forward and backward.

The fence keeps the snapshot whole: no optimizer step begins before the copy has ended. What forward itself may
change (buffers such as BatchNorm's) is copied before `take` returns. Version counters are compared at the end, so a
tensor that changed all the same fails the save by name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from typing import Any, ClassVar

import torch

from ..errors import CheckpointTimeoutError, TornSnapshotError
from ..image.shards import local_part
from ..image.tree import FlatState, key_of
from .base import ArenaStager, Snapshot
from .copying import DeviceCopies
from .pinned import PageLock


class ZeroOverheadStager(ArenaStager):
    """Overlaps the copy with training.

    Args:
        arenas: how many saves may be in flight, each with its own copy of the state in host memory.
    """

    option: ClassVar[str] = "zero_overhead"

    def __init__(self, arenas: int = 2) -> None:
        super().__init__(arenas)
        self._copies = DeviceCopies()
        self._page_lock = PageLock("zero_overhead")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-stage")
        self._pending: list[_Copying] = []
        self._pending_lock = threading.Lock()
        self._guarded: list[torch.optim.Optimizer] = []
        self._hooks: list[Any] = []

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make `optimizer.step()` wait until the running copy has ended.

        It also tells the stager which tensors only the optimizer changes; all others are copied before `take` returns.
        """
        if not any(known is optimizer for known in self._guarded):
            self._guarded.append(optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.wait_staged()))

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when every tensor may be changed.

        An error of the copy is not raised here: it is the save's own, and comes with its futures.

        Raises:
            CheckpointTimeoutError: the copy did not end within `timeout` seconds (default: timeouts.stage).
        """
        limit = self._timeout if timeout is None else timeout
        with self._pending_lock:
            pending = list(self._pending)
        if wait_futures([copying.done for copying in pending], timeout=limit).not_done:
            raise CheckpointTimeoutError(f"A snapshot was still being copied after {limit:g} s (timeouts.stage).")
        with self._pending_lock:
            self._pending = [copying for copying in self._pending if not copying.done.done()]

    def _copy(
        self, snapshot: Snapshot, flat: FlatState, slots: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        if snapshot.arena is not None:
            self._page_lock.apply(snapshot.arena, sources)
        late = self._changed_by_optimizers_alone(flat)
        stored = snapshot.layout.stored
        now: list[int] = []
        later: list[int] = []
        for number, item in enumerate(snapshot.layout.items):
            (later if late[stored[item.stored].tensor] else now).append(number)
        for event in self._copies.start([slots[n] for n in now], [sources[n] for n in now]):
            event.synchronize()
        copying = _Copying(snapshot, flat, late)
        # CUDA copies are started from this thread, so that they are ordered after the trainer's work so far.
        on_device = [n for n in later if sources[n].device.type == "cuda"]
        on_host = [n for n in later if sources[n].device.type != "cuda"]
        events = self._copies.start([slots[n] for n in on_device], [sources[n] for n in on_device])
        with self._pending_lock:
            self._pending.append(copying)
        self._thread.submit(self._finish, copying, events, [slots[n] for n in on_host], [sources[n] for n in on_host])

    def _finish(
        self,
        copying: _Copying,
        events: Sequence[torch.cuda.Event],
        slots: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> None:
        error: BaseException | None = None
        try:
            with torch.no_grad():
                self._copies.start(slots, sources)
            for event in events:
                event.synchronize()
            error = copying.torn()
        except Exception as failure:
            error = failure
        copying.settle(error)

    def _changed_by_optimizers_alone(self, flat: FlatState) -> list[bool]:
        """For every tensor: may its copy wait until the next optimizer step?

        With guarded optimizers: their parameters and their state. Without: everything but the buffers of modules in
        the state, and the version check catches what the caller changes too early.
        """
        owned = set(_pointers(_optimizer_tensors(self._guarded)))
        buffers = set(_pointers(_module_buffers(flat)))
        late = []
        for tensor in flat.tensors:
            pointer = tensor.data_ptr()
            known = pointer in owned if self._guarded else pointer not in buffers
            late.append(known and not tensor.is_inference())
        return late

    def prewarm(self, state_dict: Mapping[Any, Any]) -> None:
        """As for every arena; no copy may be running."""
        self.wait_staged()
        super().prewarm(state_dict)

    def close(self) -> None:
        """Wait for the running copy (bounded by timeouts.stage), take the hooks off, and free the arenas."""
        try:
            self.wait_staged()
        finally:
            while self._hooks:
                self._hooks.pop().remove()
            self._guarded.clear()
            self._thread.shutdown(wait=False)
            super().close()


class _Copying:
    """One copy on its way: what it needs to tell whether a tensor changed under it."""

    def __init__(self, snapshot: Snapshot, flat: FlatState, late: Sequence[bool]) -> None:
        self.done: Future[None] = Future()
        self._snapshot = snapshot
        self._watched = [
            (path, tensor)
            for path, tensor, is_late in zip(flat.tensor_paths, flat.tensors, late, strict=True)
            if is_late
        ]
        self._versions = [tensor._version for _, tensor in self._watched]

    def torn(self) -> TornSnapshotError | None:
        """An error that names what changed since the copy began, or None."""
        changed = [
            key_of(path)
            for (path, tensor), before in zip(self._watched, self._versions, strict=True)
            if tensor._version != before
        ]
        if not changed:
            return None
        named = ", ".join(f"'{key}'" for key in changed[:3]) + (f" and {len(changed) - 3} more" if changed[3:] else "")
        return TornSnapshotError(
            f"{named} changed while the snapshot was being copied, so it was thrown away. Call guard(optimizer) once "
            "before training, or wait_staged() before anything changes the state."
        )

    def settle(self, error: BaseException | None) -> None:
        self._snapshot.mark_staged(error)
        # The tensors need not live longer than the copy; the arena goes back when the save ends.
        self._watched = []
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
