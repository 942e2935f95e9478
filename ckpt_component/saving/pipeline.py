"""Accepts saves on the training thread, and completes them in order on the save thread.

So the training thread never waits for storage, and the commit never needs the training thread. `save` makes the ranks
agree and takes the snapshot; `_finish` writes and commits it, in one or more attempts.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait as wait_futures
from dataclasses import replace
from functools import partial
from typing import Any

from ..callers.write_callers import WriteCaller
from ..core.commit.commit import new_attempt
from ..core.processes.owner_process import OwnerProcess, refuse_at_exit
from ..errors import CheckpointError
from ..events import SaveReport
from ..stagers.base import Stager
from ..writers.base import Writer
from .admission import SaveAdmission
from .attempts import SaveAttempts
from .context import SaveContext, notify
from .in_flight import InFlightSaves, SaveHandle
from .planning import SavePlanner
from .prewarmer import Prewarmer
from .records import Admitted, SaveRequest, Staged, report_of
from .retry import ConsecutiveFailures, FailedAttempts, RetryLoop, is_stall

logger = logging.getLogger(__name__)


class SavePipeline:
    """Stages, writes and commits state dicts, one after the other.

    Args:
        stager: takes the snapshots; owned by the pipeline from now on
        caller: who runs the write requests; owned too
        writer: the format
        context: what is the same for all saves

    Attributes:
        stager: see above
        caller: see above
        ranks: of the context
        policy: of the context
        events: of the context
        saves: running saves, and failed ones whose error was not raised yet
        reports: reports of ended saves, in order
        last_report: see `Checkpointer.last_report`
        prewarmer: prepares the first save
    """

    def __init__(self, stager: Stager, caller: WriteCaller, writer: Writer, context: SaveContext) -> None:
        caller.prepare(context.timeouts.worker_start)
        self.stager = stager
        self.caller = caller
        self.ranks = context.ranks
        self.policy = context.policy
        self.events = context.events
        self.saves = InFlightSaves(context.progress)
        self.reports: list[SaveReport] = []
        self.last_report: SaveReport | None = None
        self.prewarmer = Prewarmer(stager)
        self._context = context
        self._timeouts = context.timeouts
        self._single_file = writer.single_file
        self._planner = SavePlanner(stager, writer, context)
        self._admission = SaveAdmission(self._planner, stager, self.saves, context)
        self._attempts = SaveAttempts(caller, writer, context)
        self._retries = RetryLoop(context.ranks, context.policy, context.timeouts.stage)
        self._failures = ConsecutiveFailures(context.policy.give_up_after)
        #: For the save thread. A task's arguments would keep a snapshot alive until the task has ended.
        self._staged: deque[tuple[SaveHandle, Staged]] = deque()
        self._last_task: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-save")
        self._owner = OwnerProcess("checkpointer")
        self._closing = threading.Lock()
        # If a script does not call close(), the interpreter first lets the save thread finish, then runs this.
        self._at_exit = atexit.register(_close_if_alive, weakref.ref(self))

    @property
    def busy(self) -> bool:
        """Whether all memory of the stager is in use by saves."""
        return self.stager.busy

    def save(
        self,
        state_dict: Mapping[Any, Any],
        path: str,
        *,
        may_wait: bool = True,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> tuple[Future[None], SaveHandle]:
        """Take a snapshot now, and write and commit it in the background; with an inline caller before it returns.

        Args:
            state_dict: what to save
            path: absolute path of the new checkpoint
            may_wait: False: raise, on all ranks, instead of waiting for the memory of an earlier save
            step: the training step for the report, if a manager saves
            metrics: numbers by name for the manifest; those of rank 0 are stored

        Returns:
            Two futures, as `AsyncCheckpointer.save`; the second has the `SaveReport`. With `ErrorPolicy.warn` a save
            that could not begin returns two failed futures instead of raising.

        Raises:
            CheckpointBusyError: a rank would have to wait; the save was not begun
            CheckpointWorldError: the process group is not the one that this was built with
            CheckpointError: the save could not begin, on all ranks; or the error of an earlier save
        """
        self._owner.check()
        self.ranks.check_world()
        request = SaveRequest(path, self._context.storage_of(path), step, metrics, may_wait)
        try:
            admitted = self._admission.admit(request, state_dict)
        except CheckpointError as error:
            return self._refuse(request, error)
        if isinstance(admitted, BaseException):
            raise admitted
        try:
            staged = self._stage(admitted)
        except CheckpointError as error:
            return self._refuse(request, error)
        except RuntimeError as error:
            refuse_at_exit(error)
            raise
        except KeyboardInterrupt:
            logger.warning("interrupted before the snapshot of %s was complete, so it is not saved", path)
            raise
        written = partial(self._attempts.written_by, admitted.token)
        if staged.snapshot is None:
            copied, save = _failed(staged.error), SaveHandle(request, admitted.number)
        else:
            copied, file_bytes = staged.snapshot.copied, staged.snapshot.encoded.file_bytes
            save = SaveHandle(request, admitted.number, file_bytes=file_bytes, written=written)
        self._staged.append((save, staged))
        try:
            with self._closing:  # what is listed by then, `close` waits for
                self._owner.check()
                self._last_task = self._thread.submit(self._finish)
                self.saves.append(save)
        except (CheckpointError, RuntimeError) as error:
            self._staged.pop()
            if staged.snapshot is not None:
                staged.snapshot.release()
            refuse_at_exit(error)
            raise
        del admitted, staged  # which refer to the state
        if not self.caller.in_other_process:
            # Whatever is pressed: the write starts threads, which Python refuses once the main thread has ended.
            self.saves.follow_in_any_case(save)
            if not save.delivered:
                save.result()
        return copied, save

    def _stage(self, admitted: Admitted) -> Staged:
        """Take the snapshot. A failure is raised with one rank; with several it fails the attempt on all."""
        request, owner = admitted.request, self._context.run.ownership.token
        attempt = new_attempt(request.storage, request.path, admitted.token, owner, self._single_file)
        snapshot, comparison, failure = None, None, None
        try:
            plan = self._planner.share(replace(admitted.plan, storage=request.storage))
            snapshot = self.stager.take(plan)
            comparison = self._planner.compare(plan, admitted.number)
        except Exception as error:
            if self.ranks.world_size == 1:
                raise
            failure = error
            if snapshot is not None:
                snapshot.release()
                snapshot = None
        stall_s = time.perf_counter() - request.started
        return Staged(admitted, attempt, snapshot, failure, comparison, self.stager.host_bytes, stall_s)

    def _refuse(self, request: SaveRequest, error: CheckpointError) -> tuple[Future[None], SaveHandle]:
        """End a save that failed before anything was copied: raise, or return failed futures."""
        given_up = self._failures.add(error)
        if not self.policy.warn:
            raise given_up or error
        if given_up is not None and self.ranks.world_size == 1:
            raise given_up
        save = SaveHandle(request, self.ranks.meetings["save"], begun=False)
        stall_s = time.perf_counter() - request.started
        self._fail(save, error, given_up, report_of(request, "failed", stall_s=stall_s))
        self.saves.append(save)  # with several ranks an error is raised at the next save, on all of them
        return _failed(error), save

    def _finish(self) -> None:
        """On the save thread: end the next save, whatever happens."""
        save, staged = self._staged.popleft()
        try:
            self._write_and_commit(save, staged)
        except BaseException as error:  # a defect, or a part that ends the thread: nobody is to wait for ever
            if save.done():
                raise
            save.end(report_of(staged.admitted.request, "failed", staged, stall_s=staged.stall_s), error)

    def _write_and_commit(self, save: SaveHandle, staged: Staged) -> None:
        """Write and commit a save, in one or more attempts."""
        request, in_background = staged.admitted.request, self.caller.in_other_process
        try:
            made = self._retries.run(staged.attempt, partial(self._attempts.run, staged))
        finally:
            if staged.snapshot is not None:
                staged.snapshot.release()
        if isinstance(made, FailedAttempts):
            stall_s = staged.stall_s if in_background else time.perf_counter() - request.started
            report = report_of(request, "failed", staged, attempts=made.number, stall_s=stall_s)
            self._fail(save, made.error, self._failures.add(made.error), report)
            return
        if self._failures.count:
            self._failures.reset()
        report = report_of(request, "committed", staged, made.written, made)
        if self.ranks.is_leader:
            notify(self._context.run.after_commit, report)
        if not in_background:
            report = replace(report, stall_s=time.perf_counter() - request.started)
        self.last_report = report = self.events.with_loss(report)
        self.add_report(report)
        save.end(report)
        del staged  # which refers to the state
        if self.ranks.is_leader:
            notify(self._context.run.after_save, report)

    def _fail(self, save: SaveHandle, error: BaseException, given_up: BaseException | None, report: SaveReport) -> None:
        """End a failed save with its error, or with `given_up` after too many failures."""
        raised = given_up or error
        tolerated = self.policy.warn and given_up is None
        if tolerated:
            logger.warning("%s was not saved, and training continues (checkpoint.on_error=warn): %s", save.path, error)
        else:
            logger.info("%s was not saved: %s", save.path, raised)  # whoever waits or saves next gets the error
        outcome = "skipped" if self.policy.warn and is_stall(error) else "failed"
        report = replace(report, outcome=outcome, error=str(raised), lost_s=report.stall_s)
        self.add_report(report)
        if tolerated and not self.caller.in_other_process:
            self.last_report = report
        save.end(report, raised, delivered=tolerated)

    def add_report(self, report: SaveReport) -> None:
        """Keep and record the report of a save that has ended, or that was skipped before it was begun."""
        self.reports.append(report)
        self.events.saved(report)

    def run_after_saves(self, task: Callable[[], None]) -> None:
        """Run a task on the save thread, after the saves so far; later saves and `close` wait for it."""
        try:
            self._last_task = self._thread.submit(task)
        except RuntimeError as error:
            refuse_at_exit(error)
            raise

    def guard(self, optimizer: Any) -> None:
        """See `Stager.guard`."""
        self.stager.guard(optimizer)

    def wait_staged(self, timeout: float | None = None) -> None:
        """See `Stager.wait_staged`."""
        self.stager.wait_staged(timeout)

    def prewarm(self, state_dict: Mapping[Any, Any], *, wait: bool = True) -> None:
        """Plan and allocate memory for a state; see `SavePlanner.prewarm`."""
        self._planner.prewarm(state_dict, wait=wait)

    def wait(self) -> None:
        """Wait until the saves in flight have ended; see `Checkpointer.wait`."""
        self.saves.wait(self._timeouts.whole_save)
        self.events.drain(self._timeouts.close)
        self.saves.raise_first()

    def close(self) -> None:
        """Finish the saves in flight, then stop the writer process and free the memory. Safe to call twice.

        Does nothing in a forked child, whose exit calls this too.

        Raises:
            CheckpointTimeoutError: a save hung; its deadline is timeouts.write
            CheckpointError: the first error that was not raised yet
            KeyboardInterrupt: while it waited; the saves continue, and the exit of the interpreter waits for them
        """
        if not self._owner.is_here:
            return
        with self._closing:
            if self._owner.closed:
                return
            self._owner.closed = True
        self._retries.stop_pausing()
        is_idle = False
        try:
            try:
                self.stager.close()
            finally:
                is_idle = self._drain()
        except (KeyboardInterrupt, SystemExit):
            # To stop the writer process now would lose its save. What is registered at exit closes this.
            self._owner.closed = False
            raise
        except BaseException:
            self._release(is_idle)
            raise
        self._release(is_idle)
        self.saves.raise_first()

    def _release(self, is_idle: bool) -> None:
        """Free everything; with `is_idle` False, while the save thread is still busy."""
        atexit.unregister(self._at_exit)
        self.events.close(self._timeouts.close)
        self._thread.shutdown(wait=is_idle)
        self.caller.close(self._timeouts.close)
        self._context.reuse.close()
        self.ranks.close()

    def _drain(self) -> bool:
        """Wait until the save thread has nothing to do. Returns whether that is so."""
        limit = self._timeouts.close
        self.saves.wait(self._timeouts.whole_save + limit)
        if self.ranks.is_leader:
            with contextlib.suppress(RuntimeError):  # the interpreter exits: the thread takes no more, nor is it needed
                self._last_task = self._thread.submit(self._context.run.close)
        if self._last_task is not None and wait_futures([self._last_task], limit).not_done:
            text = "deleting old checkpoints took longer than %g s (timeouts.close); it ends with this process"
            logger.warning(text, limit)
            return False
        return True


def _failed(error: Exception | None) -> Future[None]:
    staged: Future[None] = Future()
    staged.set_exception(error)
    return staged


def _close_if_alive(pipeline: weakref.ref[SavePipeline]) -> None:
    alive = pipeline()
    if alive is not None:
        alive.close()
