"""What the caller of a save holds, and the list of saves in flight."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import TypeVar

from ..core.outside import OUTSIDE, Future, Outside
from ..core.progress import Progress, no_progress
from ..errors import CheckpointTimeoutError, RanksError
from ..events import SaveReport
from .records import SaveRequest

logger = logging.getLogger(__name__)

#: How often progress is shown.
_POLL_SECONDS = 0.2

_Result = TypeVar("_Result")


class SaveFuture(Future[_Result]):
    """A future that knows whether its error was delivered, so that no error is lost and none is raised twice.

    Args:
        outside: by which it is waited for

    Attributes:
        delivered: the error was raised or retrieved, or was logged and need not be raised
    """

    def __init__(self, outside: Outside = OUTSIDE) -> None:
        super().__init__()
        self._outside = outside
        self.set_running_or_notify_cancel()
        self.delivered = False

    @property
    def undelivered(self) -> BaseException | None:
        """The error of a failed save until it is delivered, else None."""
        return None if self.delivered or not self.done() else super().exception(0)

    def deliver(self) -> None:
        """Whoever calls this raises the error, or logs it."""
        self.delivered = True

    def result(self, timeout: float | None = None) -> _Result:
        """Return the result, or raise the save's error.

        Raises:
            TimeoutError: the save still runs after so many seconds
        """
        self._await_end(timeout)
        self.delivered = True
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the save's error, or None. Raises as `result` if the save still runs."""
        self._await_end(timeout)
        self.delivered = True
        return super().exception(0)

    def _await_end(self, timeout: float | None) -> None:
        # The TimeoutError of a future is another class in Python 3.10.
        if not self._outside.wait_for([self], timeout):
            raise TimeoutError(f"The save still runs after {timeout:g} s.")


class SaveHandle(SaveFuture[SaveReport]):
    """What the caller of `save` holds: done when the save has ended.

    Args:
        request: what was asked for
        number: number of the save in its checkpointer, the same on all ranks
        outside: by which it is waited for
        begun: False if nothing was copied, because the save could not begin
        file_bytes: approximate size of what this rank writes
        written: returns how much of that is written by now

    Attributes:
        path: absolute path of the checkpoint
        step: the training step, if a manager saves
        report: set when the save ends
    """

    report: SaveReport

    def __init__(
        self,
        request: SaveRequest,
        number: int,
        outside: Outside = OUTSIDE,
        *,
        begun: bool = True,
        file_bytes: int = 0,
        written: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(outside)
        self.path = request.path
        self.step = request.step
        self.number = number
        self.begun = begun
        self.file_bytes = file_bytes
        self.written = written

    def end(self, report: SaveReport, error: BaseException | None = None, *, delivered: bool = False) -> None:
        """End the save.

        Args:
            report: what became of it
            error: why it failed; None: it is committed
            delivered: the error was logged, and need not be raised
        """
        self.report = report
        if error is None:
            self.set_result(report)
        else:
            # It may have been raised already, in the words of another rank, while the save still ran here.
            self.delivered = self.delivered or delivered
            self.set_exception(error)


class InFlightSaves(list[SaveHandle]):
    """Running saves, and failed ones whose error was not raised yet, in order; `drop_ended` drops the others.

    Args:
        progress: follows the bytes of saves that are waited for
        outside: by which they are waited for
    """

    def __init__(self, progress: Progress = no_progress, outside: Outside = OUTSIDE) -> None:
        super().__init__()
        self._outside = outside
        self._progress = progress
        self._poll_seconds = _POLL_SECONDS if progress is not no_progress else math.inf

    def drop_ended(self) -> list[tuple[int, str]]:
        """Drop ended saves, except those whose error was not raised yet; return their numbers and error texts."""
        failed = []
        for save in list(self):
            if not save.done():
                continue
            error = save.undelivered
            if error is None:
                self.remove(save)
            else:
                failed.append((save.number, str(error)))
        return failed

    def error_of(self, number: int, text: str, timeout: float) -> BaseException:
        """Return the error of a save that another rank reports as failed; waits until it fails on this rank too."""
        for save in self:
            if save.number == number:
                save.deliver()
                try:
                    return save.exception(timeout) or RanksError(text)
                except TimeoutError:
                    break
        return RanksError(text)

    def deliver_failed(self) -> list[SaveHandle]:
        """The failed saves whose error was not raised yet; the caller raises the first, if any."""
        failed = [save for save in self if save.undelivered is not None]
        for save in failed:
            save.deliver()
        return failed

    def raise_first(self) -> None:
        """Raise the first error that was not raised yet."""
        for save in self:
            if save.undelivered is not None:
                save.result(0)

    def wait(self, limit: float) -> None:
        """Wait until all saves have ended, successfully or not.

        Args:
            limit: seconds for each

        Raises:
            CheckpointTimeoutError: a save is still running
        """
        running = [save for save in self if not save.done()]
        deadline = self._outside.now() + limit * len(running)
        for save in running:
            if not self.follow(save, deadline):
                raise CheckpointTimeoutError(
                    f"A save was still running after {limit:g} s; see timeouts.stage and timeouts.write."
                )

    def follow(self, save: SaveHandle, deadline: float = math.inf) -> bool:
        """Wait until a save has ended, and report its progress.

        Args:
            save: the save
            deadline: when to stop waiting (`Outside.now`)

        Returns:
            False if it is still running.
        """
        shown = 0
        with self._progress(f"saving {os.path.basename(save.path)}", save.file_bytes) as advance:
            while not self._outside.wait_for([save], min(deadline - self._outside.now(), self._poll_seconds)):
                if self._outside.now() >= deadline:
                    return False
                written = min(save.written(), save.file_bytes)  # the process writes more than the files
                advance(written - shown)
                shown = written
        return True

    def follow_in_any_case(self, save: SaveHandle) -> None:
        """Wait until a save has ended, bounded by the deadlines of its phases. Only then Ctrl-C is raised."""
        interrupt: KeyboardInterrupt | None = None
        while not save.done():
            try:
                if interrupt is not None:
                    text = "interrupted; waiting until %s is saved, whatever you press; kill -9 %d gives it up"
                    logger.warning(text, os.path.basename(save.path), os.getpid())
                self.follow(save)
            except KeyboardInterrupt as another:
                interrupt = another
        if interrupt is not None:
            raise interrupt
