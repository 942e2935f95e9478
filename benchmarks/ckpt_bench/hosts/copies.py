"""How fast a server pulls a snapshot from its peer, beside a plain TCP stream; and what that costs training."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..measure.loop_clock import LoopClock
from ..measure.states import STATES, make_state
from ..measure.training_loop import Loop
from .client_pair import SnapshotStorePair

#: Copies into new memory, before those that are measured: a run has two copies at a peer, and uses their memory again.
_FIRST = 2
_SECONDS = 300.0
_QUIET_STEPS = 25


def measure_copies(state: str, pairs: int, step_seconds: float, folder: str) -> Iterator[dict[str, Any]]:
    """Seconds of copies and of plain streams in turn, and how much longer steps take beside copies.

    Args:
        state: whose tensors are copied
        pairs: how many times
        step_seconds: approximate duration of a step
        folder: not used

    Yields:
        `bytes`; seconds of each turn, as `stream`, `copy`, and `first_copy`, into new memory; CPU seconds of both
        processes, as `stream_cpu` and `copy_cpu`; and if steps can have a core of their own, `step_ratio` and
        `step_cpu_ratio` of each turn.
    """
    items = [math.prod(shape) * dtype.itemsize for _, shape, dtype in STATES[state]()]
    with SnapshotStorePair(items) as pair:
        first = [pair.copy().seconds for _ in range(_FIRST)]
        turns = [(pair.stream(), pair.copy()) for _ in range(pairs)]
        yield {
            "bytes": sum(items),
            "first_copy": first,
            "stream": [stream.seconds for stream, _ in turns],
            "copy": [copy.seconds for _, copy in turns],
            "stream_cpu": [stream.cpu_s for stream, _ in turns],
            "copy_cpu": [copy.cpu_s for _, copy in turns],
        }
        first_core, *others = sorted(os.sched_getaffinity(0))
        if others:
            os.sched_setaffinity(0, {first_core})
            pair.stay_on(others)
            loop = Loop(make_state("tiny"), 1, step_seconds)
            ratios = [_step_ratios(loop, pair) for _ in range(pairs)]
            yield {"step_ratio": [wall for wall, _ in ratios], "step_cpu_ratio": [cpu for _, cpu in ratios]}


def _step_ratios(loop: Loop, pair: SnapshotStorePair) -> tuple[float, float]:
    """How long steps are while a snapshot is copied, over those before and after it; and the same of their CPU."""
    with ThreadPoolExecutor(1) as pool:
        before = _steps(loop, lambda steps: steps == _QUIET_STEPS)
        copying = pool.submit(pair.copy)
        beside = _steps(loop, lambda _: copying.done())
        copying.result(_SECONDS)
    after = _steps(loop, lambda steps: steps == _QUIET_STEPS)
    wall, cpu = (2 * b / (a + c) for a, b, c in zip(before, beside, after, strict=True))
    return wall, cpu


def _steps(loop: Loop, is_enough: Callable[[int], bool]) -> tuple[float, float]:
    """The mean seconds of steps, without what the host stole, and their mean CPU seconds."""
    clock, steps = LoopClock(), 0
    while steps == 0 or not is_enough(steps):
        loop.step()
        steps += 1
    spent = clock.spent()
    return spent.wall_s / steps, spent.cpu_s / steps
