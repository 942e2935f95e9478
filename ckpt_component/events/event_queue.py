"""A queue for what must neither delay training nor a save: the event file, or a listener."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..core.lane import Lane
from ..core.outside import Future, Outside
from ..errors import CheckpointError

logger = logging.getLogger(__name__)

#: Tasks that may wait. A save makes three or four.
_WAITING = 1000


class EventQueue:
    """Runs tasks on a lane; drops them if too many wait, and waits for none twice. Safe to use from any thread.

    Args:
        name: of the thread
        what: whose tasks these are, for a warning
        outside: what it runs in
    """

    def __init__(self, name: str, what: str, outside: Outside) -> None:
        self._what, self._outside = what, outside
        self._lane = Lane(name, outside)
        self._full = False
        #: Until this has ended, `drain` does not wait again.
        self._late: Future[None] | None = None

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task after the earlier ones. Never waits: if too many are waiting, it is dropped with a warning."""
        if self._lane.waiting > _WAITING:
            if not self._full:
                logger.warning("%d events are waiting for %s; newer ones are dropped", _WAITING, self._what)
            self._full = True
            return
        try:
            self._lane.post(_record, task)
        except CheckpointError as error:
            logger.debug("%s", error)

    def drain(self, deadline: float) -> None:
        """Wait until the tasks so far have run, or until a deadline; after that, not again for the same tasks.

        Args:
            deadline: when to stop waiting (`Outside.now`)
        """
        newest = self._lane.newest
        if not self._hangs and not self._lane.is_here and not self._lane.drain(deadline):
            self._late = newest
            logger.warning("not waiting any longer for %s (checkpoint.timeouts.close)", self._what)

    def close(self, deadline: float) -> None:
        """Run the tasks so far, then end the thread; bounded as `drain`. Safe to call twice."""
        self.drain(deadline)
        self._lane.close(self._outside.now() if self._hangs else deadline)

    @property
    def _hangs(self) -> bool:
        return self._late is not None and not self._late.done()


def _record(task: Callable[[], None]) -> None:
    try:
        task()
    except BaseException:  # not even SystemExit goes unnoticed
        logger.exception("an event could not be recorded")
