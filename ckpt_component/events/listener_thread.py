"""Calls a listener on a thread of its own: whatever it does, training, saves and other listeners continue."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

from ..errors import CheckpointError, describe_error
from .event_thread import EventThread
from .listener import CheckpointListener
from .reports import LoadReport, SaveReport

logger = logging.getLogger(__name__)


class ListenerThread:
    """Calls one listener, and warns when it fails, and while it hangs.

    Args:
        listener: the listener
        slow_seconds: after how many seconds in one call it is reported to hang

    Attributes:
        thread: the thread, to wait for it and to end it
    """

    def __init__(self, listener: CheckpointListener, slow_seconds: float) -> None:
        self._listener = listener
        self._name = f"the listener {type(listener).__name__}"
        self._failed = False
        #: Doubled with each slow call, so that a listener that is always slow fills no log.
        self._slow_seconds = slow_seconds
        self.thread = EventThread("ckpt-listener", self._name)

    def tell(self, method: str, *reports: SaveReport | LoadReport) -> None:
        """Call a method of the listener after the earlier calls; never waits."""
        self.thread.submit(partial(self._call, method, *reports))

    def _call(self, method: str, *reports: SaveReport | LoadReport) -> None:
        limit, began = self._slow_seconds, time.monotonic()
        watch = threading.Timer(limit, self._warn, [method, limit])
        watch.daemon = True
        watch.start()
        try:
            getattr(self._listener, method)(*reports)
        except BaseException as error:  # SystemExit would end this thread, and nothing else
            self._report(method, error)
        finally:
            watch.cancel()
        took = time.monotonic() - began
        if took > limit:
            self._slow_seconds = 2 * took
            logger.warning("%s has returned from %s after %.1f s", self._name, method, took)

    def _warn(self, method: str, limit: float) -> None:
        text = "%s has not returned from %s for %g s; saves continue, and its later events wait"
        logger.warning(text, self._name, method, limit)

    def _report(self, method: str, error: BaseException) -> None:
        """Log the first failure of the listener."""
        if not self._failed:
            self._failed = True
            text = "%s failed in %s (%s); it is still called for later events, and its further errors not logged"
            expected = isinstance(error, CheckpointError)
            logger.error(text, self._name, method, describe_error(error), exc_info=not expected)
