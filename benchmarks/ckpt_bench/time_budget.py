"""Share the time of a run among its processes: where it is short, saves and repeats become fewer, and rows do not."""

from __future__ import annotations

import math
import time

#: Of its share of the time, what a process spends on saves or loads of a kind before it begins no further one. There
#: are four kinds, and the last one of each takes seconds longer: about half of the time is left for a second repeat.
_PART_OF_A_KIND = 1 / 24
#: A further repeat may take so many times as long as the one before.
_MARGIN = 1.1
#: A process that takes so many times its share is killed, because it takes the time of others: it hangs, or the machine
#: is too slow.
_PATIENCE = 1.5


class TimeBudget:
    """The time that processes may take from now on.

    Args:
        seconds: the time; None: as long as they need
    """

    def __init__(self, seconds: float | None) -> None:
        self._until = time.monotonic() + (math.inf if seconds is None else seconds)

    @property
    def left(self) -> float:
        """Seconds that are left; infinite without a limit."""
        return self._until - time.monotonic()

    def has(self, seconds: float) -> bool:
        """Whether there is time for what took so many seconds before."""
        return seconds * _MARGIN <= self.left

    def part(self, count: int) -> TimeBudget:
        """The budget of the next of `count` equal parts."""
        return TimeBudget(self.left / count)

    def enough_seconds(self, processes: int) -> float:
        """Seconds after which a process begins no further save or load of a kind, if so many are to come."""
        return self.left / processes * _PART_OF_A_KIND

    def timeout(self, processes: int) -> float:
        """Seconds after which the next of so many processes is killed; none are left if it is not positive."""
        return self.left / processes * (_PATIENCE if processes > 1 else 1)
