"""What a stretch of a loop took: wall time without what the host stole, and the CPU and queue time of its thread."""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple

#: Place of `steal` in the first line of /proc/stat, after the word `cpu`.
_STEAL = 7


class LoopTime(NamedTuple):
    """Seconds of a stretch of a loop.

    Attributes:
        wall_s: wall time, less the time in which the host gave a core of this machine to others
        cpu_s: time that the loop's own thread ran
        queue_s: time that it was ready to run and waited for a core
    """

    wall_s: float
    cpu_s: float
    queue_s: float


class LoopClock:
    """Starts when it is made, on the thread of the loop."""

    def __init__(self) -> None:
        # Of the thread, not of the process: https://docs.kernel.org/scheduler/sched-stats.html
        self._schedstat = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._start = self._now()

    def spent(self) -> LoopTime:
        """What was spent since the start."""
        return LoopTime(*(now - then for now, then in zip(self._now(), self._start, strict=True)))

    def _now(self) -> LoopTime:
        with open(self._schedstat, encoding="ascii") as file:
            ran, queued = (int(value) / 1e9 for value in file.read().split()[:2])
        return LoopTime(time.perf_counter() - stolen_seconds(), ran, queued)


def stolen_seconds() -> float:
    """Seconds since the start of the machine that the host gave to others, the mean over its cores."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = int(file.readline().split()[1 + _STEAL])
    return ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
