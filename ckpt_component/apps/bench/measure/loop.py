"""A loop that simulates training, and the time that a save costs it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .saver import Saver
from .states import State, settle

_WIDTH = 512
#: Steps averaged for the undisturbed loop.
_QUIET_STEPS = 50
#: Steps averaged after the call of save.
_NEXT_STEPS = 10


@dataclass(frozen=True)
class Disturbance:
    """How one save affected the loop.

    Attributes:
        lost_s: wall time of the loop with the save, minus that of the same steps and update without one.
        step_ratio: mean step time from the update until the save was complete, divided by the undisturbed one; None
            with fewer than three steps in that time.
        next_steps: mean time of the ten steps after the call of save, divided by the undisturbed one.
    """

    lost_s: float
    step_ratio: float | None
    next_steps: float


class Loop:
    """Steps of matrix products, and an in-place update of all tensors.

    Args:
        state: the tensors to update.
        threads: number of torch threads of a step.
        step_s: approximate duration of a step in seconds.
    """

    def __init__(self, state: State, threads: int, step_s: float) -> None:
        self._state = state
        self._tensors = list(state.values())
        device = self._tensors[0].device
        self._threads = threads
        self._left, self._right = (torch.rand(_WIDTH, _WIDTH, device=device) for _ in "ab")
        self._out = torch.empty(_WIDTH, _WIDTH, device=device)
        self._products = 1
        with self._loop_threads():
            for _ in range(3):
                self._products = max(1, round(self._products * step_s / self._step()))

    def update(self) -> float:
        """Add 1 to every element, in place of an optimizer step, and return the seconds that took."""
        started = time.perf_counter()
        torch._foreach_add_(self._tensors, 1)
        settle(self._state)
        return time.perf_counter() - started

    def disturbed_by(self, saver: Saver, path: str, tail_s: float) -> Disturbance:
        """Save once, and run steps until the save is complete and for `tail_s` seconds after it.

        The update follows the first step, as an optimizer's would, once the saver says that the tensors may change.
        """
        before = self._undisturbed()
        with self._loop_threads():  # like the update below
            update_s = sorted(self.update() for _ in range(3))[1]
        started = time.perf_counter()
        saver.save(path)
        done, done_at, steps, during = False, started, 0, list[float]()
        first: list[float] = []
        with self._loop_threads():
            while True:
                took = self._step()
                steps += 1
                if steps <= _NEXT_STEPS:
                    first.append(took)
                if steps == 1:
                    saver.wait_staged()
                    self.update()
                elif not done:
                    during.append(took)
                now = time.perf_counter()
                if not done and saver.poll():
                    done, done_at = True, time.perf_counter()
                if done and now - done_at >= tail_s:
                    break
        wall = time.perf_counter() - started
        saver.finish()
        quiet = (before + self._undisturbed()) / 2
        ratio = sum(during) / len(during) / quiet if len(during) >= 3 else None
        return Disturbance(wall - steps * quiet - update_s, ratio, sum(first) / len(first) / quiet)

    def _undisturbed(self) -> float:
        with self._loop_threads():
            return sum(self._step() for _ in range(_QUIET_STEPS)) / _QUIET_STEPS

    def _step(self) -> float:
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
