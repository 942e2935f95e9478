"""What a stretch of work took: seconds, and the CPU time of this process and of those that it waited for."""

from __future__ import annotations

import resource
import time
from typing import NamedTuple


class Spent(NamedTuple):
    """What was spent.

    Attributes:
        seconds: wall time
        cpu_s: CPU time
    """

    seconds: float
    cpu_s: float


class SpentClock:
    """Starts when it is made. A process counts when it has ended and was waited for."""

    def __init__(self) -> None:
        self._start = self._now()

    def spent(self) -> Spent:
        """What was spent since the start."""
        return Spent(*(now - then for now, then in zip(self._now(), self._start, strict=True)))

    def _now(self) -> Spent:
        usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return Spent(time.perf_counter(), sum(usage.ru_utime + usage.ru_stime for usage in usages))
