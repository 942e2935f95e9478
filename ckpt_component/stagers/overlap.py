"""Is it worth while to copy beside training? Measured, not assumed: on some machines overlap costs far more.

The optimizer steps are the clock. A step that a copy ran beside is compared with the undisturbed ones before it; what
it took longer is the cost of the overlap. An awaited copy costs the time that it takes.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque

logger = logging.getLogger(__name__)

#: So many undisturbed steps are the measure, and so many overlapped copies are judged together.
_STEPS = 8
_SAVES = 3
#: No awaited copy is slower than this (bytes a second, one thread); overlap that costs less is not examined.
_SLOWEST_MEMORY = 2e9
#: How much more overlap must cost than an awaited copy.
_FACTOR = 1.5


class OverlapMonitor:
    """Decides for one stager, from what it reports, whether the next copy is awaited.

    Attributes:
        awaits: whether copies are awaited from now on, because overlap was found to cost more.
    """

    def __init__(self) -> None:
        self.awaits = False
        self._last_step: float | None = None
        self._undisturbed: deque[float] = deque(maxlen=_STEPS)
        self._costs: deque[float] = deque(maxlen=_SAVES)
        self._awaited: float | None = None
        #: Bytes of the copy that began since the last step, and of the last one that was judged.
        self._beside: int | None = None
        self._copied = 0

    @property
    def wants_trial(self) -> bool:
        """Whether the next copy should be awaited once, to learn what that costs."""
        return self._awaited is None and self._cost > self._copied / _SLOWEST_MEMORY

    def began(self, nbytes: int) -> None:
        """A copy began beside training."""
        self._beside = nbytes

    def beside_other(self) -> None:
        """A snapshot leaves a device buffer beside training: the step that comes next says nothing about overlap."""
        self._last_step = None

    def awaited(self, seconds: float) -> None:
        """A copy was awaited, and took that long."""
        self._awaited = seconds
        self._last_step = None  # the step that it was a part of says nothing
        self._decide()

    def stepped(self, now: float) -> None:
        """An optimizer step is about to change the weights, and nothing is being copied any more.

        Args:
            now: monotonic seconds.
        """
        before, self._last_step = self._last_step, now
        beside, self._beside = self._beside, None
        if before is None:
            return
        if beside is None:
            self._undisturbed.append(now - before)
        elif len(self._undisturbed) == _STEPS:
            self._costs.append(now - before - statistics.median(self._undisturbed))
            self._copied = beside
            self._decide()

    @property
    def _cost(self) -> float:
        """Seconds that overlap costs a save; 0 while too few were measured."""
        return statistics.median(self._costs) if len(self._costs) == _SAVES else 0.0

    def _decide(self) -> None:
        if self.awaits or self._awaited is None or self._cost <= _FACTOR * self._awaited:
            return
        self.awaits = True
        logger.warning(
            "checkpoint/stager=zero_overhead: copying beside training cost it %.3f s a save, and waiting for the copy "
            "costs %.3f s, so copies are awaited from now on",
            self._cost,
            self._awaited,
        )
