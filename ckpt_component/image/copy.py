"""Copies between tensors in host memory, at the speed of the memory.

The work is cut into portions, once per structure, which a few threads take one after the other. Of a large tensor each
is a `memmove` of as much as leaves work for all threads: glibc writes past the caches only from a size on that it takes
from the last cache (99 MB on a virtual machine with 260 MB), and is 1.6 times faster then. Small ones are gathered by
system calls that take their addresses as columns: `torch._foreach_copy_` needs as long again for what it does around
each copy, and touches every tensor.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from ..memory.int_columns import column_of, picked
from ..memory.libc import memmove
from .copy_progress import Marks, Reached, Tracks
from .gather import MOST_PIECES, ROW_BYTES, Gather
from .slots import Slots

_PORTION_BYTES = 8 << 20
#: Of one tensor at most so much at a time: a copy that is to stop, or to be helped with, must not be long in coming.
_MOST_BYTES = 256 << 20
#: From here on a tensor is worth portions of its own.
_LARGE_BYTES = 512 << 10
#: Below this torch copies with one thread (its grain size), and a portion may hold many of them.
_GRAIN_ELEMENTS = 32768


class HostCopy:
    """How tensors are copied into their slots.

    Args:
        slots: contiguous tensors in CPU memory, each of its source's shape and dtype.
        sources: CPU tensors of any strides. Later copies take others of the same shapes, dtypes, strides, and with
            the same of them conjugated and negated views.
        tracks: begin and end, as addresses, of the ranges that are to advance together; ascending.

    Raises:
        RuntimeError: a source does not fit its slot.
    """

    def __init__(
        self, slots: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], tracks: Sequence[tuple[int, int]] = ()
    ) -> None:
        self._slots = slots
        if isinstance(slots, Slots):
            targets, sizes = slots.addresses, slots.sizes
        else:
            targets = column_of(slot.data_ptr() for slot in slots)
            sizes = column_of(slot.nbytes for slot in slots)
        most = min(_MOST_BYTES, int(sizes.sum()) // (2 * torch.get_num_threads()))
        small: list[int] = []
        odd: list[int] = []
        wide: list[int] = []
        portions: list[_Portion] = []
        for number, (source, size) in enumerate(zip(sources, sizes.tolist(), strict=True)):
            if source.nbytes != size:
                raise RuntimeError(f"A tensor of {source.nbytes} bytes does not fit its slot of {size}.")
            if size == 0:
                continue
            if not source.is_contiguous() or source.is_conj() or source.is_neg():
                (odd if source.numel() < _GRAIN_ELEMENTS else wide).append(number)
            elif size < _LARGE_BYTES:
                small.append(number)
            else:
                target = int(targets[number])
                step = max(_PORTION_BYTES, min(size, most))
                for start in range(0, size, step):
                    nbytes = min(step, size - start)
                    work = partial(
                        HostCopy._copy_large, target=target + start, number=number, start=start, nbytes=nbytes
                    )
                    portions.append(_Portion(target + start, target + start + nbytes, work))
        #: Rows of address and bytes of the small ones' slots, and their numbers.
        self._numbers = column_of(small)
        self._pieces = torch.stack([picked(targets, self._numbers), picked(sizes, self._numbers)], 1)
        for first, last, nbytes in _cut(self._pieces[:, 1].tolist()):
            work = partial(HostCopy._copy_small, first=first, last=last, nbytes=nbytes)
            portions.append(_Portion(*_extent(targets, sizes, small[first:last]), work))
        # Those that only torch can copy, because their memory is not what is to be stored; large ones together, because
        # torch copies each of them with all its threads.
        groups = [odd[first:last] for first, last, _ in _cut(sizes[odd].tolist())]
        for numbers in [*groups, wide] if wide else groups:
            work = partial(HostCopy._copy_odd, numbers=numbers)
            portions.append(_Portion(*_extent(targets, sizes, numbers), work))
        self._portions = portions
        self._tracks = Tracks(tracks, [(portion.start, portion.end) for portion in portions])
        self._gather = Gather()

    def begin(
        self,
        sources: Sequence[torch.Tensor],
        addresses: torch.Tensor | None = None,
        reached: Reached | None = None,
    ) -> Portions:
        """A copy that is yet to be done, by whoever calls `Portions.drain`.

        Args:
            sources: what is copied.
            addresses: where the memory of each source begins, int64, where that is known; else every portion looks.
            reached: is told how far each of the tracks is complete, by whichever thread has come so far.
        """
        origins = None
        if addresses is not None:
            origins = torch.stack([picked(addresses, self._numbers), self._pieces[:, 1]], 1)
        work: deque[tuple[int, Callable[[], object]]] = deque(
            (number, partial(self._portions[number].copy, self, sources, origins)) for number in self._tracks.order
        )
        return Portions(work, None if reached is None else Marks(self._tracks, reached))

    def _copy_large(
        self, sources: Sequence[torch.Tensor], _: object, *, target: int, number: int, start: int, nbytes: int
    ) -> None:
        # ctypes gives up the GIL, and the C library's copy does not read what it is about to overwrite.
        memmove(target, sources[number].data_ptr() + start, nbytes)

    def _copy_small(
        self, sources: Sequence[torch.Tensor], origins: torch.Tensor | None, *, first: int, last: int, nbytes: int
    ) -> None:
        if origins is None:
            found = [sources[number].data_ptr() for number in self._numbers[first:last].tolist()]
            origins = torch.stack([column_of(found), self._pieces[first:last, 1]], 1)
            at = origins.data_ptr()
        else:
            at = origins.data_ptr() + first * ROW_BYTES
        if not self._gather(at, self._pieces.data_ptr() + first * ROW_BYTES, last - first, nbytes):
            self._copy_by_torch(self._numbers[first:last].tolist(), sources)

    def _copy_odd(self, sources: Sequence[torch.Tensor], _: object, *, numbers: Sequence[int]) -> None:
        self._copy_by_torch(numbers, sources)

    def _copy_by_torch(self, numbers: Sequence[int], sources: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_([self._slots[number] for number in numbers], [sources[number] for number in numbers])


@dataclass(frozen=True)
class _Portion:
    """What one thread copies at a time: between which addresses it ends up, and which method copies it.

    A method of whatever `HostCopy`: bound to its own, it would keep an arena's memory until the collector comes.
    """

    start: int
    end: int
    copy: Callable[[HostCopy, Sequence[torch.Tensor], torch.Tensor | None], object]


def _extent(targets: torch.Tensor, sizes: torch.Tensor, numbers: Sequence[int]) -> tuple[int, int]:
    """Between which addresses the slots of these tensors lie."""
    starts = targets[numbers]
    return int(starts.min()), int((starts + sizes[numbers]).max())


def _cut(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first, behind the last, bytes) of small tensors that make up a portion."""
    portions, first, nbytes = [], 0, 0
    for number, size in enumerate(sizes, 1):
        nbytes += size
        if nbytes >= _PORTION_BYTES or number - first == MOST_PIECES or number == len(sizes):
            portions.append((first, number, nbytes))
            first, nbytes = number, 0
    return portions


class Portions:
    """One copy, portion by portion. Any number of threads may work on it.

    Args:
        work: what is to be done, by number.
        marks: is told of every portion that is done, but while training waits for the copy of none: who follows it
            would take processors and the memory's bandwidth away from it.
    """

    def __init__(self, work: deque[tuple[int, Callable[[], object]]], marks: Marks | None = None) -> None:
        self._work = work
        self._marks = marks
        self._running = 0
        self._awaited = False
        self._untold: list[int] = []
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def drain(self, until: float = math.inf) -> None:
        """Take portions until none is left; others may still be at work on theirs. `finish` tells what failed.

        Args:
            until: take no further one then (monotonic seconds).
        """
        with torch.no_grad():  # holds for one thread alone
            while True:
                with self._changed:
                    if not self._work or time.monotonic() >= until:
                        return
                    number, portion = self._work.popleft()
                    self._running += 1
                failed: BaseException | None = None
                try:
                    portion()
                except BaseException as error:
                    failed = error
                with self._changed:
                    self._running -= 1
                    if failed is not None:
                        self._work.clear()
                        self._error = failed
                    elif self._marks is not None:
                        self._untold.append(number)
                        self._tell(self._marks)
                    self._changed.notify_all()

    def stop(self) -> None:
        """Leave the rest undone: nobody needs the copy any more."""
        with self._changed:
            self._work.clear()

    def help(self, threads: int, until: float = math.inf) -> None:
        """Copy what is left with as many threads, this one included, because training waits for it now.

        Args:
            threads: how many, with those that are at work already.
            until: as for `drain`.
        """
        with self._changed:
            self._awaited = True
        try:
            self._drain_with(threads, until)
        finally:
            with self._changed:
                self._awaited = False
                if self._marks is not None:
                    self._tell(self._marks)

    def finish(self, threads: int) -> None:
        """Get it done; when this returns, everything is copied.

        Raises:
            RuntimeError: a portion could not be copied.
        """
        self._drain_with(threads)
        with self._changed:
            while self._running:  # memory copies; nothing here waits for anything outside
                self._changed.wait()
            if self._error is not None:
                raise self._error

    def _drain_with(self, threads: int, until: float = math.inf) -> None:
        helpers = min(threads - self._running, len(self._work)) - 1
        if helpers > 0:
            with ThreadPoolExecutor(helpers, thread_name_prefix="ckpt-copy") as pool:
                for _ in range(helpers):
                    pool.submit(self.drain, until)
                self.drain(until)
        else:
            self.drain(until)

    def _tell(self, marks: Marks) -> None:
        """Let those who follow the copy know how far it has come; under the lock."""
        if not self._awaited:
            for number in self._untold:
                marks.done(number)
            self._untold.clear()


def copy_on_host(slots: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], threads: int) -> None:
    """Copy `sources` into `slots`, pairwise; done on return.

    Args:
        slots: contiguous tensors in CPU memory, each of its source's shape and dtype.
        sources: CPU tensors of any strides.
        threads: how many may copy at the same time, this one included.
    """
    HostCopy(slots, sources).begin(sources).finish(threads)
