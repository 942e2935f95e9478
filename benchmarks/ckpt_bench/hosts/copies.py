"""How fast a keeper copies a snapshot to its peer, beside a plain TCP stream; and what that costs training."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..measure.states import STATES, make_state
from ..measure.training_loop import Loop
from .keeper_pair import KeeperPair

#: Copies into new memory, before those that are measured: a run has two copies at a peer, and uses their memory again.
_FIRST = 2
_SECONDS = 300.0


def measure_copies(state: str, pairs: int, step_seconds: float, folder: str) -> Iterator[dict[str, Any]]:
    """Seconds of copies and of plain streams in turn, and how much longer steps take beside copies.

    Args:
        state: whose tensors are copied
        pairs: how many times
        step_seconds: approximate duration of a step
        folder: not used

    Yields:
        `bytes`; seconds of each turn, as `stream`, `copy`, and `first_copy`, into new memory; CPU seconds of both
        processes, as `stream_cpu` and `copy_cpu`; and if steps can have a core of their own, `step_ratio` of each turn.
    """
    items = [math.prod(shape) * dtype.itemsize for _, shape, dtype in STATES[state]()]
    with KeeperPair(items) as pair:
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
            yield {"step_ratio": [_step_ratio(loop, pair) for _ in range(pairs)]}


def _step_ratio(loop: Loop, pair: KeeperPair) -> float:
    """How long steps are while a snapshot is copied, over those just before and after it."""
    with ThreadPoolExecutor(1) as pool:
        before = [loop.step() for _ in range(10)]
        copying = pool.submit(pair.copy)
        beside = [loop.step()]
        while not copying.done():
            beside.append(loop.step())
        copying.result(_SECONDS)
    after = [loop.step() for _ in range(10)]
    return statistics.fmean(beside) / statistics.fmean([*before, *after])
