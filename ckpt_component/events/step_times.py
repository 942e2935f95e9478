"""When the steps of training ended, and how much a save slowed them.

One deque is all that the training thread touches: it appends, and the thread that ends saves takes from the other end.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from ..core.outside import OUTSIDE, Outside

#: Most steps that wait to be recorded by a save or at the end, and most with which those of a save are compared.
_PENDING, _RECENT = 20_000, 256
#: Fewest steps without a save from which the usual length of a step is estimated.
_ENOUGH = 3


class StepTimes:
    """The ends of the steps that were not recorded yet, and of the last few that were.

    Args:
        outside: what the run runs in
    """

    def __init__(self, outside: Outside = OUTSIDE) -> None:
        self._date = outside.date
        self._pending: deque[tuple[int, float]] = deque(maxlen=_PENDING)
        self._last: int | None = None
        #: (step, its end, its length or None), oldest first.
        self._recent: deque[tuple[int, float, float | None]] = deque(maxlen=_RECENT)
        #: When recent saves began and ended.
        self._saves: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._taking = outside.lock()

    def ended(self, step: int) -> None:
        """A step has ended now. Called by the training thread, once or more for each step; costs less than 1 us."""
        if step != self._last:
            self._last = step
            self._pending.append((step, self._date()))

    def take(self) -> list[dict[str, Any]]:
        """The records of the steps since the last call: one per sequence of consecutive steps."""
        events: list[dict[str, Any]] = []
        with self._taking:
            follows = None
            while self._pending:
                step, end = self._pending.popleft()
                if step != follows:
                    events.append({"event": "steps", "time": round(end, 6), "first": step, "ends": []})
                events[-1]["ends"].append(round(end, 6))
                follows = step + 1
                before = self._recent[-1] if self._recent else (0, 0.0, None)
                self._recent.append((step, end, end - before[1] if before[0] == step - 1 else None))
        return events

    def lost(self, began: float, stall: float, ended: float) -> float:
        """Estimate what a save cost training: its stall, plus how much longer than others the steps beside it took.

        Only complete steps count. Without at least three that ran beside no save, the result is the stall.

        Args:
            began: when `save` was called, seconds since 1970
            stall: how long the call took
            ended: when the save ended, seconds since 1970
        """
        with self._taking:
            self._saves.append((began, ended))
            recent, saves = list(self._recent), list(self._saves)
        alone = [
            length
            for _, end, length in recent
            if length is not None and not any(first < end and end - length < last for first, last in saves)
        ]
        beside = [end for _, end, _ in recent if began + stall < end <= ended]
        if len(alone) < _ENOUGH or not beside:
            return stall
        return stall + max(beside[-1] - (began + stall) - len(beside) * statistics.median(alone), 0.0)
