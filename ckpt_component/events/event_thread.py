"""A thread for what must neither delay training nor a save: the event file, or a listener."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

#: Tasks that may wait. A save makes three or four.
_WAITING = 1000


class EventThread:
    """Runs tasks one after the other, on a daemon thread that starts with the first. Safe to use from any thread.

    Args:
        name: of the thread
        what: whose tasks these are, for a warning
    """

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what = name, what
        self._tasks: deque[Callable[[], None]] = deque()
        #: How many tasks were accepted, and how many have run.
        self._accepted = self._ran = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._full = False
        #: Until so many have run, `drain` does not wait again.
        self._late = 0

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task after the earlier ones. Never waits: if too many are waiting, it is dropped with a warning."""
        with self._changed:
            if self._closed:
                return
            if len(self._tasks) >= _WAITING:
                if not self._full:
                    logger.warning("%d events are waiting for %s; newer ones are dropped", _WAITING, self._what)
                self._full = True
                return
            self._tasks.append(task)
            self._accepted += 1
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError as error:  # from Python 3.12 on, while the interpreter ends
                    logger.debug("no thread starts (%s), so the caller runs what is for %s", error, self._what)
            self._changed.notify_all()
            has_thread = self._thread is not None
        if not has_thread:
            self._run()

    def drain(self, deadline: float) -> None:
        """Wait until the tasks so far have run, or until a deadline; after that, not again for the same tasks.

        Args:
            deadline: when to stop waiting (`time.monotonic`)
        """
        with self._changed:
            last = self._accepted
            if self._ran < self._late or threading.current_thread() is self._thread:
                return
            if not self._changed.wait_for(lambda: self._ran >= last, max(deadline - time.monotonic(), 0.0)):
                self._late = last
                logger.warning("not waiting any longer for %s (checkpoint.timeouts.close)", self._what)

    def close(self, deadline: float) -> None:
        """Run the tasks so far, then end the thread; bounded as `drain`. Safe to call twice."""
        self.drain(deadline)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread, hangs = self._thread, self._ran < self._late
        if thread is not None and not hangs and thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _run(self) -> None:
        """Run tasks until `close`; without a thread, those that there are."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed or self._thread is None)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            try:
                task()
            except BaseException:  # not even SystemExit ends the thread
                logger.exception("an event could not be recorded")
            del task  # it may hold much of a report while the thread waits
            with self._changed:
                self._ran += 1
                self._changed.notify_all()
