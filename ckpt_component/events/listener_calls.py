"""Calls a listener on a thread of its own: whatever it does, training, saves and other listeners continue."""

from __future__ import annotations

import contextlib
import logging

from ..core.lane import Lane
from ..core.outside import Latch, Outside
from ..errors import CheckpointError, describe_error
from .event_queue import EventQueue
from .listener import CheckpointListener
from .reports import LoadReport, SaveReport

logger = logging.getLogger(__name__)


class ListenerCalls(EventQueue):
    """Calls one listener, and warns when it fails, and while it hangs.

    Args:
        listener: the listener
        slow_seconds: after how many seconds in one call it is reported to hang
        outside: what it runs in
    """

    def __init__(self, listener: CheckpointListener, slow_seconds: float, outside: Outside) -> None:
        self._listener = listener
        super().__init__("ckpt-listener", f"the listener {type(listener).__name__}", outside)
        self._watch = Lane("ckpt-listener-watch", outside)
        self._failed = False
        #: Doubled with each slow call, so that a listener that is always slow fills no log.
        self._slow_seconds = slow_seconds

    def tell(self, method: str, *reports: SaveReport | LoadReport) -> None:
        """Call a method of the listener after the earlier calls; never waits."""
        with contextlib.suppress(CheckpointError):  # it is closed
            self.post(self._call, method, *reports)

    def stop(self, *, cancel: bool = True) -> None:
        """See the base class."""
        super().stop(cancel=cancel)
        self._watch.stop(cancel=False)

    def _call(self, method: str, *reports: SaveReport | LoadReport) -> None:
        limit, began, returned = self._slow_seconds, self._outside.now(), self._outside.latch()
        with contextlib.suppress(CheckpointError, RuntimeError):  # no thread starts, and it is called all the same
            self._watch.submit(self._warn, method, limit, returned)
        try:
            getattr(self._listener, method)(*reports)
        except BaseException as error:  # SystemExit would end this thread, and nothing else
            self._report(method, error)
        finally:
            returned.set()
        took = self._outside.now() - began
        if took > limit:
            self._slow_seconds = 2 * took
            logger.warning("%s has returned from %s after %.1f s", self._whom, method, took)

    def _warn(self, method: str, limit: float, returned: Latch) -> None:
        """On the thread that watches: say so if a call does not return."""
        if not returned.wait(limit):
            text = "%s has not returned from %s for %g s; saves continue, and its later events wait"
            logger.warning(text, self._whom, method, limit)

    def _report(self, method: str, error: BaseException) -> None:
        """Log the first failure of the listener."""
        if not self._failed:
            self._failed = True
            text = "%s failed in %s (%s); it is still called for later events, and its further errors not logged"
            expected = isinstance(error, CheckpointError)
            logger.error(text, self._whom, method, describe_error(error), exc_info=not expected)
