"""`RequestQueue`: work on checkpoints, one at a time, each in a process of low priority that is started for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ..core.lane import Lane
from ..core.outside import OUTSIDE, Future, Outside
from ..core.processes.exit_text import describe_exit
from ..core.processes.start import Child, start_in_background
from ..errors import CheckpointSaveError, CheckpointTimeoutError
from ..events import SaveReport

logger = logging.getLogger(__name__)

#: For a process whose work is given up to delete its files.
_LEAVE_SECONDS = 5.0


class RequestQueue:
    """While one checkpoint is worked on, only the newest request waits.

    Args:
        module: of the process; it gets a job, sends an answer, and ends
        name: of the thread
        work: called on the thread for each request; calls `run`, and raises nothing
        timeout: seconds for one request
        setting: where the timeout comes from, for the text of an error
        outside: of the run
    """

    def __init__(
        self,
        module: str,
        name: str,
        work: Callable[[SaveReport], None],
        timeout: float,
        setting: str,
        outside: Outside = OUTSIDE,
    ) -> None:
        self._module, self._name, self._work = module, name, work
        self._timeout, self._setting, self._outside = timeout, setting, outside
        self._lane = Lane(name, outside)
        self._lock = outside.lock()
        self._process: Child | None = None
        #: What is worked on now, and what waits, in order.
        self._pending: dict[Future[None], SaveReport] = {}
        self._given_up = outside.latch()

    def add(self, report: SaveReport) -> list[SaveReport]:
        """Work on a checkpoint. Does not wait; returns the request that gives way, if there is one."""
        with self._lock:
            if self._given_up.is_set:
                return []
            # Not `newest_only`: the first one has its turn, even if it has not begun.
            skipped = [waiting for future, waiting in [*self._pending.items()][1:] if future.cancel()]
            future = self._lane.submit(self._work, report)
            self._pending[future] = report
            future.add_done_callback(self._pending.pop)
        return skipped

    def in_use(self) -> set[str]:
        """The checkpoints that are or will be worked on."""
        with self._lock:
            return {report.path for report in [*self._pending.values()]}

    def end(self, *, finish: bool) -> None:
        """Wait for the requests, or end the process of the one that runs. Bounded by their deadlines.

        Args:
            finish: wait
        """
        with self._lock:
            last = [report.path for report in [*self._pending.values()][-1:]]
            if not finish:
                self._given_up.set()
                self._lane.stop()
        if not last:
            return
        if finish:
            logger.info("waiting until %s is done (%s)", *last, self._name)
        elif (process := self._process) is not None:
            process.end(_LEAVE_SECONDS)
        # One that runs and one that waits; each ends by itself at its deadline.
        self._lane.drain(self._outside.now() + 2 * (self._timeout + _LEAVE_SECONDS))

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """On the thread: run the process with a job, and return its answer.

        Raises:
            CheckpointTimeoutError: it took too long
            CheckpointSaveError: it failed, or was given up
        """
        process = self._process = start_in_background(self._module, job)
        try:
            if self._given_up.is_set:  # before there was a process to tell
                process.hang_up()
            frame = process.receive(self._outside.now() + self._timeout)
        except TimeoutError as error:
            raise CheckpointTimeoutError(f"it took longer than {self._timeout:g} s ({self._setting})") from error
        finally:
            code = process.end(_LEAVE_SECONDS)
        if frame is None and self._given_up.is_set:
            raise CheckpointSaveError("the run has ended before its end")
        answer: dict[str, Any] = {"error": f"its process {describe_exit(code)}"} if frame is None else frame[0]
        if "error" in answer:
            raise CheckpointSaveError(answer["error"])
        return answer
