"""`Waits`: for whom a process waits, and until when, in words that others can be shown. Imports no torch.

    with outside.waits.on("rank 3, which has not voted on step 200", until) as wait:
        while not voted():
            wait.look()
            outside.sleep(pause)

A wait of less than five seconds costs two lookups and is told to nobody. One that lasts longer is logged once, at info,
and given to those who have asked for it: the events of a run, which `ckpt watch` shows, and what a snapshot server
answers, which `ckpt memory ls` shows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

#: A wait that lasts longer is shown.
SHOWN_SECONDS = 5.0


@dataclass(frozen=True)
class LongWait:
    """A wait that is shown.

    Attributes:
        whom: for whom, and for what
        since: when it began, in seconds since 1970
        until: when it ends at the latest, in seconds since 1970; None: it has no deadline
        ended: when it has ended; None: it has not
    """

    whom: str
    since: float
    until: float | None
    ended: float | None = None

    def plain(self) -> dict[str, Any]:
        """It as values of JSON."""
        times = {"since": self.since, "until": self.until, "ended": self.ended}
        return {"for": self.whom, **{name: time and round(time, 3) for name, time in times.items()}}


class Waits:
    """See the top of this file. Safe to use from any thread.

    Args:
        now: monotonic seconds
        date: seconds since 1970
    """

    def __init__(self, now: Callable[[], float], date: Callable[[], float]) -> None:
        self._now, self._date = now, date
        self._shown: dict[Wait, LongWait] = {}
        self._told: list[Callable[[LongWait], None]] = []

    @contextmanager
    def on(self, whom: str | Callable[[], str], until: float = math.inf) -> Iterator[Wait]:
        """Wait for somebody, as long as this is entered.

        Args:
            whom: for whom, and for what, as the end of "waiting for ..."; or returns it, when it is shown
            until: the deadline, in seconds of `Outside.now`
        """
        wait = Wait(self, whom, self._now(), until)
        try:
            yield wait
        finally:
            shown = self._shown.pop(wait, None)
            if shown is not None:
                self._tell(LongWait(shown.whom, shown.since, shown.until, self._date()))

    def long(self) -> list[LongWait]:
        """Those that are shown now."""
        return [*self._shown.values()]

    def tell(self, about: Callable[[LongWait], None]) -> Callable[[], None]:
        """Call a function when a wait is shown, and when it has ended. It must not wait.

        Returns:
            What ends that.
        """
        self._told.append(about)
        return lambda: self._told.remove(about) if about in self._told else None

    def _show(self, wait: Wait) -> None:
        now, date = self._now(), self._date()
        whom = wait.whom if isinstance(wait.whom, str) else wait.whom()
        until = None if wait.until == math.inf else date + wait.until - now
        self._shown[wait] = shown = LongWait(whom, date + wait.since - now, until)
        limit = "without a deadline" if until is None else f"for at most {max(wait.until - now, 0):.0f} s more"
        logger.info("waiting for %s, %s", whom, limit)
        self._tell(shown)

    def _tell(self, shown: LongWait) -> None:
        for about in [*self._told]:
            about(shown)


class Wait:
    """A wait that continues.

    Args:
        waits: where it is
        whom, until: see `Waits.on`
        since: when it began
    """

    __slots__ = ("_shows_at", "_waits", "since", "until", "whom")

    def __init__(self, waits: Waits, whom: str | Callable[[], str], since: float, until: float) -> None:
        self._waits = waits
        self._shows_at = since + SHOWN_SECONDS
        self.whom, self.since, self.until = whom, since, until

    def look(self) -> None:
        """Called again and again by who waits: shows the wait once it is long."""
        if self._waits._now() >= self._shows_at:
            self._shows_at = math.inf
            self._waits._show(self)

    def for_all(self, waits: Callable[[float], bool]) -> bool:
        """Wait in one call, which is made twice if the wait is long.

        Args:
            waits: waits for so many seconds, and returns whether there is nothing more to wait for

        Returns:
            What it has returned last.
        """
        if waits(min(self._shows_at, self.until) - self._waits._now()):
            return True
        self.look()
        return waits(self.until - self._waits._now())
