"""Measures whether copying in the background pays off: on some machines overlap costs far more than waiting.

Time is measured between optimizer steps. A step with a copy in the background is compared with the undisturbed steps
before it; the difference is the cost of overlap. An awaited copy costs the time that it takes.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque

logger = logging.getLogger(__name__)

#: Number of undisturbed steps, and of overlapped copies, whose medians are compared.
_STEPS = 8
_SAVES = 3
#: An awaited copy is faster than this (bytes per second, one thread); cheaper overlap is not examined.
_SLOWEST_MEMORY = 2e9
#: Copies are awaited if overlap costs more than this times an awaited copy.
_FACTOR = 1.5


class OverlapMonitor:
    """Decides for a stager, from the times that it reports, whether the next copy is awaited.

    Attributes:
        awaits: whether copies are awaited from now on, because overlap costs more.
    """

    def __init__(self) -> None:
        self.awaits = False
        self._last_step: float | None = None
        self._undisturbed: deque[float] = deque(maxlen=_STEPS)
        self._costs: deque[float] = deque(maxlen=_SAVES)
        self._awaited: float | None = None
        #: Bytes of the copy that began since the last step, and of the last one that was measured.
        self._copying: int | None = None
        self._copied = 0

    @property
    def wants_trial(self) -> bool:
        """Whether the next copy should be awaited once, to measure what that costs."""
        return self._awaited is None and self._cost > self._copied / _SLOWEST_MEMORY

    def began(self, nbytes: int) -> None:
        """Record that a copy began in the background."""
        self._copying = nbytes

    def awaited(self, seconds: float) -> None:
        """Record how long an awaited copy took."""
        self._awaited = seconds
        self._last_step = None  # the step that contains it is no measure
        self._decide()

    def stepped(self, now: float) -> None:
        """Record an optimizer step that is about to change the weights, after all copies have ended.

        Args:
            now: monotonic seconds.
        """
        before, self._last_step = self._last_step, now
        nbytes, self._copying = self._copying, None
        if before is None:
            return
        if nbytes is None:
            self._undisturbed.append(now - before)
        elif len(self._undisturbed) == _STEPS:
            self._costs.append(now - before - statistics.median(self._undisturbed))
            self._copied = nbytes
            self._decide()

    @property
    def _cost(self) -> float:
        """Seconds that overlap costs per save; 0 until enough saves were measured."""
        return statistics.median(self._costs) if len(self._costs) == _SAVES else 0.0

    def _decide(self) -> None:
        if self.awaits or self._awaited is None or self._cost <= _FACTOR * self._awaited:
            return
        self.awaits = True
        logger.warning(
            "checkpoint/stager=zero_overhead: copying in the background cost %.3f s per save, and waiting for the copy "
            "costs %.3f s, so copies are awaited from now on",
            self._cost,
            self._awaited,
        )
