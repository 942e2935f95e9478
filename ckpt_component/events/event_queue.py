"""A queue for what must neither delay training nor a save: the event file, or a listener."""

from __future__ import annotations

import logging

from ..core.lane import Lane
from ..core.outside import Outside

logger = logging.getLogger(__name__)

#: Events that may wait. A save makes three or four.
_WAITING = 1000


class EventQueue(Lane):
    """A lane that says for whom events are dropped, or waited for no longer.

    Args:
        name: of the thread
        what: who takes the events, for a warning
        outside: what it runs in
    """

    failure = "an event could not be recorded"

    def __init__(self, name: str, what: str, outside: Outside) -> None:
        super().__init__(name, outside, may_lose=_WAITING, jobs=what)
        self._whom = what
        self._full = False

    def _dropped(self) -> None:
        if not self._full:
            logger.warning("%d events are waiting for %s; newer ones are dropped", _WAITING, self._whom)
        self._full = True

    def _given_up(self) -> None:
        logger.warning("not waiting any longer for %s (checkpoint.timeouts.close)", self._whom)
