"""Completes saves in order on a lane: writes and commits each, and tells what became of it.

So the training thread never waits for storage, and the commit never needs the training thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter

from ..core.lane import Lane
from ..core.processes.owner_process import ENDING
from ..errors import CheckpointError
from ..events import SaveReport
from .attempts import SaveAttempts
from .context import SaveContext
from .in_flight import SaveHandle
from .records import SaveRequest, Staged, report_of
from .retry import ConsecutiveFailures, FailedAttempts, RetryLoop, is_stall

logger = logging.getLogger(__name__)


class SaveQueue:
    """Completes the saves that it is given, one after the other.

    Args:
        attempts: makes the attempts at a save
        context: what is the same for all saves of the queue
        in_background: whether training goes on while a save is written
        add_report: called with the report of each save that has ended
        name: of the thread
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
        self._retries = RetryLoop(context.ranks, context.policy, context.timeouts.stage)
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
        if snapshot is None:
            save = SaveHandle(admitted.request, admitted.number, outside)
        else:
            written = partial(self._attempts.written_by, admitted.token)
            size = snapshot.encoded.file_bytes
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
            made = self._retries.run(staged.attempt, partial(self._attempts.run, staged))
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

    def stop_pausing(self) -> None:
        """Make no pause before another attempt any more, because `close` waits for the saves."""
        self._retries.stop_pausing()

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
