"""A thread for what must neither delay training nor a save: event files and listeners."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

#: Tasks that may wait. A save makes three or four.
_WAITING = 1000


class EventThread:
    """Runs tasks one after the other, on a daemon thread that starts with the first. Safe to use from any thread."""

    def __init__(self) -> None:
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False
        self._full = False
        self._hung = False

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task after the earlier ones. Never waits: if too many are waiting, it is dropped with a warning."""
        if self._closed:
            return
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckpt-events", daemon=True)
                self._thread.start()
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            if not self._full:
                logger.warning("%d events are waiting for a slow listener or disk; newer ones are dropped", _WAITING)
            self._full = True

    def drain(self, timeout: float) -> None:
        """Wait until the tasks so far have run, or for `timeout` seconds; then later calls do not wait again."""
        if self._thread is None or self._closed or self._hung or threading.current_thread() is self._thread:
            return
        done, deadline = threading.Event(), time.monotonic() + timeout
        with contextlib.suppress(queue.Full):
            self._tasks.put(done.set, timeout=timeout)
        self._hung = not done.wait(max(deadline - time.monotonic(), 0.0))
        if self._hung:
            logger.warning("a listener or the disk of the events did not answer for %g s; not waiting for it", timeout)

    def close(self, timeout: float) -> None:
        """Run the tasks so far, then end the thread; bounded as `drain`. Safe to call twice."""
        self.drain(timeout)
        thread, already, self._closed = self._thread, self._closed, True
        if thread is None or already or self._hung or thread is threading.current_thread():
            return
        with contextlib.suppress(queue.Full):  # the thread is a daemon
            self._tasks.put_nowait(None)
            thread.join(timeout)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                logger.exception("an event could not be recorded")
            del task  # it may hold much of a report while the thread waits
