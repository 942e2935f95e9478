"""`RequestQueue`: work on checkpoints, one at a time, each in a process of low priority that is started for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..core.job import Job
from ..core.lane import Lane
from ..core.outside import OUTSIDE, Future, Outside
from ..core.processes.start import start_in_background
from ..errors import CheckpointSaveError, CheckpointTimeoutError
from ..events import SaveReport

logger = logging.getLogger(__name__)

#: For a process whose work is given up to delete its files.
_LEAVE_SECONDS = 5.0


class RequestQueue:
    """While one checkpoint is worked on, only the newest request waits.

    Args:
        module: of the process; it gets a job, sends an answer, such as the `error` of one that failed, and ends
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
        self._name, self._work = name, work
        self._timeout, self._setting, self._outside = timeout, setting, outside
        self._lock = outside.lock()
        launch = partial(start_in_background, module, outside=outside)
        self._job = Job(f"{name} process", launch, outside, once=True, leave_seconds=_LEAVE_SECONDS)
        #: What is worked on now, and what waits, in order.
        self._pending = pending = dict[Future[None], SaveReport]()
        self._lane = Lane(name, outside, jobs=partial(_in_words, name, pending))
        self._given_up = False

    def add(self, report: SaveReport) -> list[SaveReport]:
        """Work on a checkpoint. Does not wait; returns the request that gives way, if there is one."""
        with self._lock:
            if self._given_up:
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
                self._given_up = True
                self._lane.stop()
        if not last:
            return
        if finish:
            logger.info("waiting until %s is done (%s)", *last, self._name)
        else:
            self._job.give_up("was given up")
        # One that runs and one that waits; each ends by itself at its deadline.
        self._lane.drain(self._outside.now() + 2 * (self._timeout + _LEAVE_SECONDS))

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """On the thread: have a process do something, and return its answer.

        Raises:
            CheckpointTimeoutError: it took too long
            CheckpointSaveError: it failed, or was given up
        """
        try:
            answer = self._job.ask(request, self._timeout, "its request")[0]
        except CheckpointTimeoutError as error:
            raise CheckpointTimeoutError(f"it took longer than {self._timeout:g} s ({self._setting})") from error
        except CheckpointSaveError as error:
            if self._given_up:
                raise CheckpointSaveError("the run has ended before its end") from error
            raise
        if "error" in answer:
            raise CheckpointSaveError(answer["error"])
        return answer


def _in_words(name: str, pending: Mapping[Any, SaveReport]) -> str:
    return f"{name} of {', '.join(report.path for report in [*pending.values()])}"
