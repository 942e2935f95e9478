"""Accepts saves on the training thread, and completes them in order on the save thread.

So the training thread never waits for storage, and the commit never needs the training thread. `save` makes the ranks
agree and takes the snapshot; `_finish` writes and commits it (`SaveTransaction`), in one or more attempts.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from typing import Any

from ..callers.write_callers import WriteCaller
from ..core.commit.commit import new_attempt, refuse_existing
from ..core.commit.names import owned_token
from ..core.coordination import Coordinator
from ..core.options import ResolvedTimeouts
from ..core.processes.home_process import HomeProcess
from ..core.progress import Progress, no_progress
from ..core.storage.storage import Storage
from ..errors import CheckpointError
from ..events import EventRecorder, SaveReport
from ..stagers.base import Stager, StatePlan
from ..writers.base import Writer
from .admission import SaveAdmission
from .attempts import RunHooks, SaveTransaction, notify
from .foresight import Foresight
from .in_flight import InFlightSaves, PendingSave
from .retry import ConsecutiveFailures, ErrorPolicy, RetryLoop, is_stall

logger = logging.getLogger(__name__)


class SavePipeline:
    """Stages, writes and commits state dicts, one after the other.

    Args:
        stager: takes the snapshots; owned by the pipeline from now on.
        caller: who runs the write requests; owned too.
        writer: the format.
        ranks: coordinator of the ranks; owned too.
        storage_of: returns the storage of a path.
        timeouts: deadlines.
        policy: what to do about saves that fail.
        events: records saves, and calls listeners; owned too. None: one that does nothing.
        hooks: hooks of the run; None: the caller chooses the paths.
        progress: follows the bytes of saves that are waited for.

    Attributes:
        saves: running saves, and failed ones whose error was not raised yet.
        reports: reports of ended saves, in order.
        last_report: see `Checkpointer.last_report`.
        foresight: prepares the first save.
    """

    def __init__(
        self,
        stager: Stager,
        caller: WriteCaller,
        writer: Writer,
        ranks: Coordinator,
        storage_of: Callable[[str], Storage],
        timeouts: ResolvedTimeouts,
        policy: ErrorPolicy,
        events: EventRecorder | None = None,
        hooks: RunHooks | None = None,
        progress: Progress = no_progress,
    ) -> None:
        caller.prepare(timeouts.worker_start)
        self.stager = stager
        self.caller = caller
        self.ranks = ranks
        self.policy = policy
        self.saves = InFlightSaves(progress)
        self.reports: list[SaveReport] = []
        self.last_report: SaveReport | None = None
        self.foresight = Foresight(stager)
        self.events = events or EventRecorder()
        self._storage_of = storage_of
        self._timeouts = timeouts
        self._hooks = hooks
        self._failures = ConsecutiveFailures(policy.give_up_after)
        self._single_file = getattr(writer, "single_file", "")
        check_path = self._refuse_existing if hooks is None else hooks.check_path
        self._admission = SaveAdmission(ranks, stager, self.saves, check_path, timeouts)
        self._transaction = SaveTransaction(caller, writer, ranks, timeouts, policy.min_free_bytes, self.events, hooks)
        self._retries = RetryLoop(ranks, policy, timeouts.stage)
        self._last_task: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-save")
        self._home = HomeProcess("checkpointer")
        self._closing = threading.Lock()
        self._closed = False
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
    ) -> tuple[Future[None], PendingSave]:
        """Take a snapshot now, and write and commit it in the background; with an inline caller before it returns.

        Args:
            state_dict: what to save.
            path: absolute path of the new checkpoint.
            may_wait: False: raise, on all ranks, instead of waiting for the memory of an earlier save.
            step: the training step for the report, if a manager saves.
            metrics: numbers by name for the manifest; those of rank 0 are stored.

        Returns:
            Two futures, as `AsyncCheckpointer.save`; the second has the `SaveReport`. With `ErrorPolicy.warn` a save
            that could not begin returns two failed futures instead of raising.

        Raises:
            CheckpointBusyError: a rank would have to wait; the save was not begun.
            CheckpointWorldError: the process group is not the one that this was built with.
            CheckpointError: the save could not begin, on all ranks; or the error of an earlier save.
        """
        if self._closed:
            raise CheckpointError("This checkpointer is closed; build a new one to save again.")
        self.ranks.check_world()
        save = PendingSave(path, self._storage_of(path), step, metrics)
        try:
            plan = self._admission.admit(save, state_dict, may_wait)
            if isinstance(plan, StatePlan):
                self._stage(save, plan)
        except CheckpointError as error:
            return self._refuse(save, error)
        if not isinstance(plan, StatePlan):
            raise plan
        staged = _failed(save.error) if save.snapshot is None else save.snapshot.staged
        self.saves.append(save)
        save.stall_s = time.perf_counter() - save.started
        self._last_task = self._thread.submit(self._finish, save)
        if not self.caller.in_other_process:
            self.saves.follow(save)  # bounded by the deadlines of its phases
            if not save.delivered:
                save.result()
        return staged, save

    def _refuse_existing(self, path: str) -> None:
        refuse_existing(self._storage_of(path), path, file=self._single_file)

    def _stage(self, save: PendingSave, plan: StatePlan) -> None:
        """Take the snapshot. A failure is raised with one rank; with several it fails the attempt on all."""
        owner = ""
        if self._hooks is not None:
            owner, save.token = self._hooks.ownership.token, owned_token(save.token)
        save.attempt = new_attempt(save.fs, save.path, save.token, owner, self._single_file)
        try:
            save.snapshot = self.stager.take(plan)
            save.snapshot.comparison = self.stager.compare(plan, save.number)
        except Exception as error:
            if self.ranks.world_size == 1:
                raise
            save.error = error

    def _refuse(self, save: PendingSave, error: CheckpointError) -> tuple[Future[None], PendingSave]:
        """End a save that failed before anything was copied: raise, or return failed futures."""
        given_up = self._failures.add(error)
        if not self.policy.warn:
            raise given_up or error
        if given_up is not None and self.ranks.world_size == 1:
            raise given_up
        save.begun = False
        self._fail(save, error, given_up)
        self.saves.append(save)  # with several ranks an error is raised at the next save, on all of them
        return _failed(error), save

    def _finish(self, save: PendingSave) -> None:
        """On the save thread: make all attempts at a save, and end it."""
        save.host_bytes = self.stager.host_bytes
        committed = False
        while not committed:
            try:
                self._transaction.run(save)
                committed = True
            except BaseException as error:
                if not self._retries.prepare_next(save, error):
                    save.release()
                    self._fail(save, error, self._failures.add(error))
                    return
        save.release()
        if self._failures.count:
            self._failures.reset()
        self.last_report = report = self._report(save, self.events.with_loss(save.describe("committed")))
        save.set_result(report)
        if self._hooks is not None and self.ranks.is_leader:
            notify(self._hooks.after_save, report)

    def _fail(self, save: PendingSave, error: BaseException, given_up: BaseException | None) -> None:
        """End a failed save with its error, or with `given_up` after too many failures."""
        raised = given_up or error
        tolerated = self.policy.warn and given_up is None
        if tolerated:
            logger.warning("%s was not saved, and training continues (checkpoint.on_error=warn): %s", save.path, error)
        else:
            logger.info("%s was not saved: %s", save.path, raised)  # whoever waits or saves next gets the error
        if not (save.begun and self.caller.in_other_process):
            save.stall_s = time.perf_counter() - save.started
        outcome = "skipped" if self.policy.warn and is_stall(error) else "failed"
        report = self._report(save, save.describe(outcome, str(raised)))
        save.delivered = tolerated
        if tolerated and not self.caller.in_other_process:
            self.last_report = report
        save.set_exception(raised)

    def _report(self, save: PendingSave, report: SaveReport) -> SaveReport:
        save.report = report
        self.add_report(report)
        return report

    def add_report(self, report: SaveReport) -> None:
        """Keep and record the report of a save that has ended, or that was skipped before it was begun."""
        self.reports.append(report)
        self.events.saved(report)

    def run_after_saves(self, task: Callable[[], None]) -> None:
        """Run a task on the save thread, after the saves so far; later saves and `close` wait for it."""
        self._last_task = self._thread.submit(task)

    def wait(self) -> None:
        """Wait until the saves in flight have ended; see `Checkpointer.wait`."""
        self.saves.wait(self._timeouts.whole_save)
        self.events.drain(self._timeouts.close)
        self.saves.raise_first()

    def close(self) -> None:
        """Finish the saves in flight, then stop the writer process and free the memory. Safe to call twice.

        Does nothing in a forked child, whose exit calls this too.

        Raises:
            CheckpointTimeoutError: a save hung; its deadline is timeouts.write.
            CheckpointError: the first error that was not raised yet.
        """
        if not self._home.is_here:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self._at_exit)
        self._retries.stop_pausing()
        is_idle = False
        try:
            self.stager.close()
        finally:
            try:
                is_idle = self._drain()
            finally:
                self.events.close(self._timeouts.close)
                self._thread.shutdown(wait=is_idle)
                self.caller.close(self._timeouts.close)
                self.ranks.close()
        self.saves.raise_first()

    def _drain(self) -> bool:
        """Wait until the save thread has nothing to do. Returns whether that is so."""
        limit = self._timeouts.close
        self.saves.wait(self._timeouts.whole_save + limit)
        if self._hooks is not None and self.ranks.is_leader:
            with contextlib.suppress(RuntimeError):  # the interpreter exits: the thread takes no more, nor is it needed
                self._last_task = self._thread.submit(self._hooks.close)
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
