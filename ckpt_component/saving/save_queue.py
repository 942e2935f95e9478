"""Completes saves in order on a lane: writes and commits each, and tells what became of it.

So the training thread never waits for storage, and the commit never needs the training thread.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TypeVar

from ..core.lane import Lane
from ..core.outside import OUTSIDE, Future, Outside
from ..core.processes.running import ENDING
from ..core.progress import Progress, no_progress
from ..errors import CheckpointError, CheckpointTimeoutError, RanksError
from ..events import SaveReport
from .attempts import SaveAttempts
from .context import SaveContext, SaveRequest, Staged, report_of
from .retry import ConsecutiveFailures, FailedAttempts, RetryLoop, is_stall

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
                save.delivered = True
                try:
                    return save.exception(timeout) or RanksError(text)
                except TimeoutError:
                    break
        return RanksError(text)

    def deliver_failed(self) -> list[SaveHandle]:
        """The failed saves whose error was not raised yet; the caller raises the first, if any."""
        failed = [save for save in self if save.undelivered is not None]
        for save in failed:
            save.delivered = True
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


class SaveQueue:
    """Completes the saves that it is given, one after the other.

    Args:
        attempts: makes the attempts at a save
        context: what is the same for all saves of the queue
        in_background: whether training continues while a save is written
        add_report: called with the report of each save that has ended
        name: of the thread

    Attributes:
        retries: decides about further attempts
    """

    def __init__(
        self,
        attempts: SaveAttempts,
        context: SaveContext,
        *,
        in_background: bool,
        add_report: Callable[[SaveReport], None],
        name: str = "ckpt-save",
    ) -> None:
        self._attempts = attempts
        self._ranks = context.ranks
        self._run = context.run
        self._policy = context.policy
        self._events = context.events
        self._in_background = in_background
        self._add_report = add_report
        self.retries = RetryLoop(context.ranks, context.policy, context.timeouts.stage)
        self._failures = ConsecutiveFailures(context.policy.give_up_after, context.ranks.outside)
        #: A job's arguments would keep a snapshot alive until the job has ended.
        self._staged: deque[tuple[SaveHandle, Staged]] = deque()
        self._timeout = context.timeouts.close
        # If a script does not call close(), or Ctrl-C ends that, the interpreter waits for what was begun.
        at_exit = context.timeouts.whole_save + self._timeout
        self._lane = Lane(name, context.ranks.outside, at_exit=at_exit, jobs="saves, and what follows them")

    def submit(self, staged: Staged) -> SaveHandle:
        """Complete a save after those so far.

        Args:
            staged: the save; its snapshot, if there is one, belongs to the queue once this has returned

        Returns:
            What the caller of the save holds.

        Raises:
            CheckpointError: the interpreter is ending
            RuntimeError: no thread could be started
        """
        admitted, snapshot, outside = staged.admitted, staged.snapshot, self._ranks.outside
        if outside.is_ending():
            raise CheckpointError(ENDING)
        size = 0 if snapshot is None else snapshot.encoded.file_bytes
        written = partial(self._attempts.written_by, admitted.token)
        save = SaveHandle(admitted.request, admitted.number, outside, file_bytes=size, written=written)
        self._staged.append((save, staged))
        try:
            self._lane.submit(self._finish)
        except (CheckpointError, RuntimeError):
            self._staged.pop()
            raise
        return save

    def refuse(self, request: SaveRequest, error: CheckpointError) -> SaveHandle:
        """End a save that failed before anything was copied.

        Returns:
            The failed save. With several ranks its error is raised at the next save, on all of them.

        Raises:
            CheckpointError: the error, or that there were too many
        """
        given_up = self._failures.add(error)
        if not self._policy.warn or (given_up is not None and self._ranks.world_size == 1):
            raise given_up or error
        save = SaveHandle(request, self._ranks.meetings["save"], self._ranks.outside, begun=False)
        stall_s = perf_counter() - request.started
        self._fail(save, error, given_up, report_of(request, "failed", stall_s=stall_s))
        return save

    def _finish(self) -> None:
        """On the thread: end the next save, whatever happens."""
        save, staged = self._staged.popleft()
        try:
            self._write_and_commit(save, staged)
        except BaseException as error:  # a defect, or a part that ends the thread: nobody is to wait for ever
            if save.done():
                raise
            save.end(report_of(staged.admitted.request, "failed", staged, stall_s=staged.stall_s), error)

    def _write_and_commit(self, save: SaveHandle, staged: Staged) -> None:
        """Write and commit a save, in one or more attempts."""
        request = staged.admitted.request
        try:
            made = self.retries.run(staged.attempt, partial(self._attempts.run, staged))
        finally:
            if staged.snapshot is not None:
                staged.snapshot.release()
        if isinstance(made, FailedAttempts):
            stall_s = staged.stall_s if self._in_background else perf_counter() - request.started
            report = report_of(request, "failed", staged, attempts=made.number, stall_s=stall_s)
            self._fail(save, made.error, self._failures.add(made.error), report)
            return
        if self._failures.count:
            self._failures.reset()
        report = report_of(request, "committed", staged, made.written, made)
        if self._ranks.is_leader:
            notify(self._run.after_commit, report)
        if not self._in_background:
            report = replace(report, stall_s=perf_counter() - request.started)
        report = self._events.with_loss(report)
        self._add_report(report)
        save.end(report)
        del staged  # which refers to the state
        if self._ranks.is_leader:
            notify(self._run.after_save, report)

    def _fail(self, save: SaveHandle, error: BaseException, given_up: BaseException | None, report: SaveReport) -> None:
        """End a failed save with its error, or with `given_up` after too many failures."""
        raised = given_up or error
        tolerated = self._policy.warn and given_up is None
        if tolerated:
            self._attempts.warn_of(save.path, error)
        else:
            logger.info("%s was not saved: %s", save.path, raised)  # whoever waits or saves next gets the error
        outcome = "skipped" if self._policy.warn and is_stall(error) else "failed"
        report = replace(report, outcome=outcome, error=str(raised), lost_s=report.stall_s)
        self._add_report(report)
        save.end(report, raised, delivered=tolerated)

    def run_after_saves(self, task: Callable[[], None]) -> None:
        """Run a task on the thread, after the saves so far; later saves and `drain` wait for it."""
        self._lane.submit(task)

    def drain(self, timeout: float) -> bool:
        """End the run's part in the saves, after the last one. Returns False if that takes over `timeout` seconds."""
        if self._ranks.is_leader:
            self._lane.post(self._run.close)
        return self._lane.drain(self._ranks.outside.now() + timeout)

    def close(self, *, wait: bool) -> None:
        """End the thread.

        Args:
            wait: whether it is idle, so that its end can be waited for
        """
        self._lane.close(self._ranks.outside.now() + (self._timeout if wait else 0.0))


def notify(hook: Callable[[SaveReport], None], report: SaveReport) -> None:
    """Call a hook for a committed checkpoint; an exception is only logged."""
    try:
        hook(report)
    except Exception:
        logger.exception("%s is committed, but a hook after the commit failed", report.path)
