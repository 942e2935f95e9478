"""Copy the tensors of a state into their slots. The copy is planned once per structure and split into thread tasks.

A large tensor in host memory is copied by a few `memmove`s, as large as possible while all threads have work: above a
size that depends on the last-level cache, glibc uses non-temporal stores, which are faster. Small tensors are copied
many at a time by one system call, which takes columns of addresses; `torch._foreach_copy_` would touch every tensor.
CUDA tensors are copied on a side stream.
"""

from __future__ import annotations

import logging
import math
import os
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...state.flatten import FlatState
from ...state.tensors import column_of
from .. import libc
from ..libc import IOV_BYTES, IOV_MAX
from ..outside import OUTSIDE, Outside
from .arena import Slots
from .layout import Layout

logger = logging.getLogger("ckpt_component.image")

_TASK_BYTES = 8 << 20
#: Maximum bytes per task: only between two tasks can a copy be stopped, or other threads join it.
_MAX_TASK_BYTES = 256 << 20
#: A tensor of at least this size gets tasks of its own.
LARGE_BYTES = 512 << 10
#: Below this number of elements (torch's grain size) torch copies with one thread, so a task has many such tensors.
_GRAIN_ELEMENTS = 32768


def sources_of(layout: Layout, flat: FlatState) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The tensors to copy for the items of a layout, and their addresses. Use them under `no_grad`.

    Args:
        layout: layout of the items
        flat: a state of the layout's structure
    """
    sources = list(map(flat.tensors.__getitem__, layout.tensor_of))
    pointers = flat.pointers or array("Q", [0])
    addresses = torch.frombuffer(pointers, dtype=torch.int64).index_select(0, layout.tensor_column)
    for number, (start, count) in layout.windows.items():
        tensor = sources[number]
        sources[number] = tensor.as_strided((count,), (1,), tensor.storage_offset() + start)
        addresses[number] = sources[number].data_ptr()
    return sources, addresses


class CopyPlan:
    """How to copy the tensors of one structure into their slots.

    Args:
        slots: contiguous CPU tensors, each of the same shape and dtype as its source
        sources: tensors of any strides. Later copies may use other tensors of the same shapes, dtypes, strides and
            devices, and with the same ones conjugate or negative views.
        numbers: numbers of the tensors to copy; None: all
        proofs: for each file whose tensors are only copied if `CopyTasks` cannot prove them to be the same as before:
            its number, and the numbers of its tensors; they are none of `numbers`

    Attributes:
        tasks: what threads do
        device: a CUDA device of some of the sources, or None

    Raises:
        RuntimeError: a source does not fit its slot
    """

    def __init__(
        self,
        slots: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        numbers: Iterable[int] | None = None,
        proofs: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.slots = slots
        self.numbers = list(range(len(sources)) if numbers is None else numbers)
        #: Numbers of the CUDA tensors, by device.
        self.on_device: dict[torch.device, list[int]] = defaultdict(list)
        self.gather = Gather()
        #: Methods of `CopyTasks` and their arguments. Bound methods would keep the arena's memory alive by a cycle.
        self.tasks: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        if isinstance(slots, Slots):
            targets, sizes = slots.addresses, slots.sizes
        else:
            targets = column_of(slot.data_ptr() for slot in slots)
            sizes = column_of(slot.nbytes for slot in slots)
        nbytes = sizes.tolist()
        small, large, strided, strided_large = (list[int]() for _ in range(4))
        for number in self.numbers:
            source, size = sources[number], nbytes[number]
            if source.nbytes != size:
                raise RuntimeError(f"A tensor of {source.nbytes} bytes does not fit its slot of {size}.")
            if source.is_cuda:
                self.on_device[source.device].append(number)
            elif size and (not source.is_contiguous() or source.is_conj() or source.is_neg()):
                (strided if source.numel() < _GRAIN_ELEMENTS else strided_large).append(number)
            elif size:
                (small if size < LARGE_BYTES else large).append(number)
        self.device = next(iter(self.on_device), None)
        self.streams = {device: torch.cuda.Stream(device) for device in self.on_device}
        most = sum(nbytes[number] for number in self.numbers) // (2 * torch.get_num_threads())
        for number in large:
            step = max(_TASK_BYTES, min(nbytes[number], most, _MAX_TASK_BYTES))
            for start in range(0, nbytes[number], step):
                task = int(targets[number]) + start, number, start, min(step, nbytes[number] - start)
                self.tasks.append((CopyTasks._copy_large, task))
        self.small = column_of(small)
        #: Rows of (address, length): the slots of the small tensors.
        self.pieces = torch.stack([targets.index_select(0, self.small), sizes.index_select(0, self.small)], 1)
        self.tasks += [(CopyTasks._copy_small, task) for task in _batches([nbytes[number] for number in small])]
        # Non-contiguous tensors need torch to copy them. The large ones are one task, because torch copies each of
        # them with all its threads.
        groups = [strided[first:last] for first, last, _ in _batches([nbytes[number] for number in strided])]
        groups += [strided_large] if strided_large else []
        self.tasks += [(CopyTasks._copy_strided, (numbers,)) for numbers in groups]
        for file, items in (proofs or {}).items():
            self.tasks.append((CopyTasks._prove, (file, CopyPlan(slots, sources, items))))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.tasks and not self.on_device


class CopyTasks:
    """A copy in progress. Any number of threads may work on it.

    Copies from CUDA devices start at once. Their side stream first waits for the work queued on the trainer's current
    stream, so that it reads final values; `record_stream` keeps the memory of the sources from being reused before
    the copies are done.

    Args:
        plan: plan of the tensors' structure
        sources: the tensors to copy, by number; may contain others
        addresses: the address of each source (int64), if it cannot change before the copy; None: look it up then
        prove: for the plan's `proofs`; called with the file and `sources`, returns whether the file need not be copied
        outside: whose threads copy
    """

    def __init__(
        self,
        plan: CopyPlan,
        sources: Sequence[torch.Tensor],
        addresses: torch.Tensor | None = None,
        prove: Callable[[int, Sequence[torch.Tensor]], bool] | None = None,
        outside: Outside = OUTSIDE,
    ) -> None:
        self._plan = plan
        self._outside = outside
        self._prove_file = prove
        self._sources = sources
        self._origins: torch.Tensor | None = None
        if addresses is not None:
            self._origins = torch.stack([addresses.index_select(0, plan.small), plan.pieces[:, 1]], 1)
        self._todo = deque(plan.tasks)
        self._running = 0
        self._changed = outside.condition()
        self._error: BaseException | None = None
        self._events: list[torch.cuda.Event] = []
        for device, numbers in plan.on_device.items():
            self._events.append(self._start_on(device, numbers))

    def drain(self, until: float = math.inf, threads: int = 1) -> None:
        """Run tasks until none is left; other threads may still be running theirs. Errors are raised by `finish`.

        Args:
            until: start no task after this time, in seconds of `Outside.now`
            threads: how many threads may work, including the calling one and those already working
        """
        helpers = min(threads - self._running, len(self._todo)) - 1
        with (
            self._outside.pool(helpers, "ckpt-copy") as pool,
            torch.no_grad(),  # applies only to this thread
        ):
            for _ in range(helpers):
                pool.submit(self.drain, until)
            while True:
                with self._changed:
                    if not self._todo or self._outside.now() >= until:
                        return
                    copy, arguments = self._todo.popleft()
                    self._running += 1
                try:
                    copy(self, *arguments)
                except BaseException as error:
                    self._error = error
                    self.stop()
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    def stop(self) -> None:
        """Drop the remaining tasks: the copy is no longer needed."""
        with self._changed:
            self._todo.clear()

    def finish(self, threads: int) -> None:
        """Run the remaining tasks. When this returns or raises, no thread is copying any more.

        Raises:
            RuntimeError: a tensor could not be copied
        """
        try:
            self.drain(math.inf, threads)
        finally:
            with self._changed:
                while self._running:  # memory copies, which never block
                    self._changed.wait()
            for event in self._events:
                event.synchronize()
        if self._error is not None:
            raise self._error

    def _prove(self, file: int, plan: CopyPlan) -> None:
        if self._prove_file is None or not self._prove_file(file, self._sources):
            CopyTasks(plan, self._sources, outside=self._outside).finish(threads=1)

    def _copy_large(self, target: int, number: int, start: int, nbytes: int) -> None:
        libc.memmove(target, self._sources[number].data_ptr() + start, nbytes)

    def _copy_small(self, first: int, last: int, nbytes: int) -> None:
        plan, origins, at = self._plan, self._origins, first * IOV_BYTES
        if origins is None:
            addresses = column_of(self._sources[number].data_ptr() for number in plan.small[first:last].tolist())
            origins, at = torch.stack([addresses, plan.pieces[first:last, 1]], 1), 0
        targets = plan.pieces.data_ptr() + first * IOV_BYTES
        plan.gather(origins.data_ptr() + at, targets, last - first, nbytes)

    def _copy_strided(self, numbers: Sequence[int]) -> None:
        slots, sources = self._plan.slots, self._sources
        torch._foreach_copy_([slots[number] for number in numbers], [sources[number] for number in numbers])

    def _start_on(self, device: torch.device, numbers: Sequence[int]) -> torch.cuda.Event:
        stream = self._plan.streams[device]
        values = [self._sources[number] for number in numbers]
        with torch.cuda.device(device):
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                torch._foreach_copy_([self._plan.slots[number] for number in numbers], values, non_blocking=True)
                for value in values:
                    value.record_stream(stream)
                event = torch.cuda.Event()
                event.record(stream)
        return event


class Gather:
    """Copies many pieces of this process's memory with one system call, without holding the GIL."""

    def __init__(self) -> None:
        self._available = True

    def __call__(self, origins: int, targets: int, pieces: int, nbytes: int) -> None:
        """Copy each piece to its target.

        Args:
            origins: address of a table of the pieces: rows of address and length, 64 bits each
            targets: address of a table of the targets, with the same number of rows and the same lengths
            pieces: number of pieces; at most `IOV_MAX`
            nbytes: total size of all pieces
        """
        if self._available:
            # This call is meant for the memory of other processes; on its own memory a process needs no permission.
            writev = libc.process_vm_writev
            copied = None if writev is None else writev(os.getpid(), origins, pieces, targets, pieces, 0)
            if copied == nbytes:
                return
            self._available = False
            reason = f"{copied} of {nbytes} bytes were copied" if writev else "this C library does not have it"
            reason = str(libc.last_error().strerror) if copied == -1 else reason
            text = "process_vm_writev is unavailable (%s): copying small tensors one by one, which is slower"
            logger.warning(text, reason)
        rows = [libc.memory_at(table, pieces * IOV_BYTES, None).cast("Q") for table in (origins, targets)]
        for piece in range(0, 2 * pieces, 2):
            libc.memmove(rows[1][piece], rows[0][piece], rows[0][piece + 1])


def copy_on_host(
    slots: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    threads: int,
    numbers: Iterable[int] | None = None,
) -> None:
    """Copy `sources` into `slots`, pairwise; synchronous.

    Args:
        slots: contiguous CPU tensors, each of the same shape and dtype as its source
        sources: tensors of any strides; those to copy are CPU tensors
        threads: how many threads may copy at the same time, including this one
        numbers: numbers of the tensors to copy; None: all
    """
    CopyTasks(CopyPlan(slots, sources, numbers), sources).finish(threads)


def _batches(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Group small tensors into tasks: (first, last + 1, bytes) of each."""
    batches, first, nbytes = [], 0, 0
    for number, size in enumerate(sizes, 1):
        nbytes += size
        if nbytes >= _TASK_BYTES or number - first == IOV_MAX or number == len(sizes):
            batches.append((first, number, nbytes))
            first, nbytes = number, 0
    return batches
