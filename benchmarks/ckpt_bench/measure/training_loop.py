"""A loop that simulates training, and the time that a save costs it.

One undisturbed stretch before a save and one after it do not tell: on a shared machine two equal stretches differ by
more than a save costs. So equal cycles run in turn, with a save and without one, and each save is compared with the
cycles next to it.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .loop_clock import LoopClock, LoopTime
from .saver import Saver
from .states import State, settle

_WIDTH = 512
#: Steps averaged after the call of save.
_NEXT_STEPS = 10
#: The length of a cycle, as a multiple of the time until the first save is complete, so that slower ones fit too.
_MARGIN = 1.25


@dataclass(frozen=True)
class Cycle:
    """One run of the loop.

    Attributes:
        time: what it took, of the wall and of the loop's thread
        steps: seconds of each step
        during: number of steps until the save was complete; 0 without a save
    """

    time: LoopTime
    steps: Sequence[float]
    during: int = 0


@dataclass(frozen=True)
class Disturbance:
    """How one save affected the loop: a cycle with a save, less the mean of the cycles without one next to it.

    Attributes:
        lost_s: wall time, without what the host stole
        lost_cpu_s: CPU time of the loop's thread: its part of the save, and what made its steps slower
        lost_queue_s: time that the loop's thread was ready to run and had no core
        step_ratio: mean step time from the update until the save was complete, divided by that without a save; None
            with fewer than three steps in that time
        next_steps: the same of the ten steps after the call of save
    """

    lost_s: float
    lost_cpu_s: float
    lost_queue_s: float
    step_ratio: float | None
    next_steps: float


class Saves(NamedTuple):
    """What a cycle saves with, and where to."""

    saver: Saver
    path: str


class Loop:
    """Steps of matrix products, and an in-place update of all tensors.

    Args:
        state: the tensors to update
        threads: number of torch threads of a step
        step_s: approximate duration of a step in seconds
    """

    def __init__(self, state: State, threads: int, step_s: float) -> None:
        self._state = state
        self._tensors = list(state.values())
        device = self._tensors[0].device
        self._threads = threads
        self._left, self._right = (torch.rand(_WIDTH, _WIDTH, dtype=torch.float32, device=device) for _ in "ab")
        self._out = torch.empty(_WIDTH, _WIDTH, dtype=torch.float32, device=device)
        self._products = 1
        with self._loop_threads():
            for _ in range(3):
                self._products = max(1, round(self._products * step_s / self.step()))

    def update(self) -> float:
        """Add 1 to every element, in place of an optimizer step, and return the seconds that took."""
        started = time.perf_counter()
        torch._foreach_add_(self._tensors, 1)
        settle(self._state)
        return time.perf_counter() - started

    def cycle(self, steps: int, saves: Saves | None = None) -> Cycle:
        """Run at least `steps` steps, with one update after the first, and until the save is complete.

        The save comes first, and the update waits until the saver says that the tensors may change, as an optimizer's
        step would.

        Args:
            steps: number of steps
            saves: what to save with; None: the same without a save
        """
        took: list[float] = []
        during = 0
        clock = LoopClock()
        if saves is not None:
            saves.saver.save(saves.path)
        with self._loop_threads():
            while len(took) < steps or (saves is not None and not during):
                took.append(self.step())
                if len(took) == 1:
                    if saves is not None:
                        saves.saver.wait_staged()
                    self.update()
                if saves is not None and not during and saves.saver.poll():
                    during = len(took)
        spent = clock.spent()
        if saves is not None:
            saves.saver.finish()
        return Cycle(spent, took, during)

    def cycle_steps(self, first: Cycle, tail_s: float) -> int:
        """The number of steps of a cycle that contains a save like that of `first`, and `tail_s` seconds after it."""
        step = statistics.median(first.steps)
        return max(_NEXT_STEPS, math.ceil(first.during * _MARGIN + tail_s / step))

    def step(self) -> float:
        """Run a step without an update, and return the seconds that took."""
        started = time.perf_counter()
        for _ in range(self._products):
            torch.mm(self._left, self._right, out=self._out)
        settle(self._state)
        return time.perf_counter() - started

    @contextmanager
    def _loop_threads(self) -> Iterator[None]:
        usual = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(usual)


def in_turn(
    loop: Loop, saver: Saver, folder: str, numbers: Iterator[int], tail_s: float, remove: Callable[[str], None]
) -> tuple[str, list[Disturbance]]:
    """Run cycles without and with a save in turn, and compare each save with the cycles next to it.

    Args:
        loop: the loop
        saver: makes the saves
        folder: where to save
        numbers: one for each save that is compared; a first save is not, it tells how long a cycle must be
        tail_s: how long a cycle continues after its save, in seconds
        remove: removes a checkpoint; called between cycles

    Returns:
        The path of the last save, which is left, and the disturbances.
    """
    path = os.path.join(folder, "beside-first")
    steps = loop.cycle_steps(loop.cycle(1, Saves(saver, path)), tail_s)
    quiet: list[Cycle] = []
    busy: list[Cycle] = []
    for number in numbers:
        # What removing costs, and what the last save left to be written back, belongs to no cycle.
        remove(path)
        os.sync()
        quiet.append(loop.cycle(steps))
        path = os.path.join(folder, f"beside-{number}")
        busy.append(loop.cycle(steps, Saves(saver, path)))
    return path, [compared(each, quiet[at : at + 2]) for at, each in enumerate(busy)]


def compared(busy: Cycle, quiet: Sequence[Cycle]) -> Disturbance:
    """The disturbance of a cycle with a save, by the cycles without one next to it."""
    usual = statistics.fmean(step for cycle in quiet for step in cycle.steps[1:])
    # A save that takes longer than a cycle gets further steps, whose usual time is not lost.
    extra = len(busy.steps) - len(quiet[0].steps)
    time_of_quiet = LoopTime(*(statistics.fmean(values) for values in zip(*(each.time for each in quiet), strict=True)))
    cpu_of_step = time_of_quiet.cpu_s / len(quiet[0].steps)
    during = slice(1, busy.during)
    return Disturbance(
        lost_s=busy.time.wall_s - time_of_quiet.wall_s - extra * usual,
        lost_cpu_s=busy.time.cpu_s - time_of_quiet.cpu_s - extra * cpu_of_step,
        lost_queue_s=busy.time.queue_s - time_of_quiet.queue_s,
        step_ratio=statistics.fmean(busy.steps[during]) / usual if busy.during > 3 else None,
        next_steps=_mean_of_first(busy) / statistics.fmean(map(_mean_of_first, quiet)),
    )


def _mean_of_first(cycle: Cycle) -> float:
    return statistics.fmean(cycle.steps[:_NEXT_STEPS])
