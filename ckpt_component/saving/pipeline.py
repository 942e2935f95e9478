"""Takes saves from the training thread, and brings them to their end on a thread of its own, in order.

So the training thread never waits for storage, and the commit never needs the training thread.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from dataclasses import replace
from functools import partial
from typing import Any

from ..callers.write_callers import WriteCaller
from ..coordination import Coordinator
from ..errors import (
    CheckpointBusyError,
    CheckpointError,
    CheckpointSaveError,
    CheckpointTimeoutError,
    RanksError,
)
from ..formats.base import Writer
from ..options import ResolvedTimeouts
from ..stagers.base import Stager, StatePlan
from ..storage.commit import Attempt, refuse_existing
from ..storage.fs import FsOps
from ..storage.names import owned_token
from .adapters import Saver
from .admission import SaveAdmission, SaveDecision, SaveProposal
from .report import SaveReport
from .retry import ConsecutiveFailures, ErrorPolicy, RetryLoop, is_stall
from .transaction import PendingSave, RunHooks, SaveTransaction, notify

logger = logging.getLogger(__name__)

#: A decision that one rank knows reaches the others within this time.
_DECISION_SECONDS = 60.0


class InFlightSaves(list[PendingSave]):
    """The saves that have not been accounted for, in order: they run, or failed and their error was not raised yet."""

    def undelivered(self) -> list[tuple[int, str]]:
        """Numbers of those that failed and whose error was not raised yet, with its text."""
        failed = []
        for save in self:
            error = None if save.delivered or not save.done() else Future.exception(save, 0)
            if error is not None:
                failed.append((save.number, str(error)))
        return failed

    def error_of(self, number: int, text: str, timeout: float) -> BaseException:
        """The error of a save that another rank knows to have failed: here the same decision is on its way."""
        for save in self:
            if save.number == number:
                save.delivered = True
                try:
                    return save.exception(timeout) or RanksError(text)
                except TimeoutError:
                    break
        return RanksError(text)

    def collect(self, errors: float = 1) -> tuple[list[SaveReport], list[BaseException]]:
        """Account for the saves that ended, and forget them.

        Args:
            errors: how many errors to return; saves with further errors stay in the list.

        Returns:
            The reports of the ended saves, in order, and these errors, which count as delivered.
        """
        reports: list[SaveReport] = []
        raised: list[BaseException] = []
        kept = []
        for save in self:
            if not save.done():
                kept.append(save)
                continue
            error = None if save.delivered else Future.exception(save, 0)
            if error is not None and len(raised) >= errors:
                kept.append(save)
                continue
            if error is not None:
                save.delivered = True
                raised.append(error)
            reports.append(save.report)
        self[:] = kept
        return reports, raised

    def wait(self, limit: float) -> None:
        """Return when all of them have ended, however they did.

        Args:
            limit: seconds for each.

        Raises:
            CheckpointTimeoutError: one of them hangs.
        """
        if wait_futures(self, timeout=limit * max(len(self), 1)).not_done:
            raise CheckpointTimeoutError(f"A save was still running after {limit:g} s (timeouts.write).")


class SavePipeline(Saver):
    """Stages, writes and commits state dicts, one after the other.

    Args:
        stager: takes the snapshots; owned by the pipeline from now on.
        caller: who runs the write requests; owned too.
        writer: the format.
        ranks: how the ranks agree; owned too.
        fs: where effects go.
        timeouts: deadlines.
        policy: what to do about saves that fail.
        hooks: what the run adds to each save; None: saves to paths of the caller's choice.

    Attributes:
        saves: those that have not been accounted for.
    """

    stager: Stager

    def __init__(
        self,
        stager: Stager,
        caller: WriteCaller,
        writer: Writer,
        ranks: Coordinator,
        fs: FsOps,
        timeouts: ResolvedTimeouts,
        policy: ErrorPolicy,
        hooks: RunHooks | None = None,
    ) -> None:
        caller.prepare(timeouts.worker_start)
        self.stager = stager
        self.caller = caller
        self.ranks = ranks
        self.timeouts = timeouts
        self.saves = InFlightSaves()
        self._fs = fs
        self._policy = policy
        self._hooks = hooks
        self._failures = ConsecutiveFailures(policy.give_up_after)
        check_path = partial(refuse_existing, by_rename=fs.atomic_rename) if hooks is None else hooks.check_path
        self._admission = SaveAdmission(ranks, check_path, timeouts.max_stall)
        self._transaction = SaveTransaction(caller, writer, ranks, fs, timeouts, policy.min_free_bytes, hooks)
        self._retries = RetryLoop(ranks, policy, timeouts.stage)
        self._waiting = timeouts.waiting
        self._last_task: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-save")
        self._closing = threading.Lock()
        self._closed = False
        # A script that forgets close(): the interpreter first lets the save thread finish, then runs this.
        self._at_exit = atexit.register(_close_if_alive, weakref.ref(self))

    @property
    def busy(self) -> bool:
        """Whether all memory of the stager is being written."""
        return self.stager.busy

    def save(
        self,
        state_dict: Mapping[Any, Any],
        path: str,
        *,
        may_wait: bool = True,
        step: int | None = None,
    ) -> tuple[Future[None], PendingSave]:
        """Take a snapshot now, and write and commit it in the background; with an inline caller before it returns.

        Args:
            state_dict: what to save.
            path: absolute path of the checkpoint to be; taken paths are refused.
            may_wait: False: raise instead of waiting for an earlier save's memory.
            step: for the report.

        Returns:
            (staged, saved): done when training may change the tensors; with the `SaveReport` when it is committed. With
            `on_error: warn` a save that could not begin gives two that have failed, instead of an error.

        Raises:
            CheckpointBusyError: a rank would have to wait; nothing was begun.
            CheckpointWorldError: the ranks are others than those that this was built for.
            CheckpointError: it could not begin, with several ranks on all of them; or the error of an earlier save.
        """
        if self._closed:
            raise CheckpointError("This checkpointer is closed; build a new one to save again.")
        self.ranks.check_world()
        if step is None and self.saves:
            self.saves.collect(0)  # a manager collects the reports of its saves itself
        save = PendingSave(path, step)
        try:
            plan, decision = self._admit(save, state_dict, may_wait)
            if "token" in decision:
                self._stage(save, plan, decision)
        except CheckpointError as error:
            return self._refuse(save, error)
        if "failed" in decision:
            raise self.saves.error_of(*decision["failed"], min(_DECISION_SECONDS, self._waiting))
        if "token" not in decision:
            raise CheckpointBusyError(f"{path} came while an earlier save was still running")
        staged = _failed(save.error) if save.snapshot is None else save.snapshot.staged
        save.set_running_or_notify_cancel()
        self.saves.append(save)
        save.stall_s = time.perf_counter() - save.started
        self._last_task = self._thread.submit(self._finish, save)
        if not self.caller.in_other_process:
            wait_futures([save])  # its deadlines are those of the phases of a save
            if not save.tolerated:
                save.result()
        return staged, save

    def close(self) -> None:
        """Let the saves that were started finish, then end the writer process and free the memory. Safe to call twice.

        Raises:
            CheckpointTimeoutError: a save hung; its deadline is timeouts.write.
            CheckpointError: the first error that was not raised yet.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self._at_exit)
        self._retries.stop_pausing()
        try:
            self.stager.close()
        finally:
            try:
                self._drain()
            finally:
                self._thread.shutdown(wait=False)
                self.caller.close(self.timeouts.close)
                self.ranks.close()
        for number, text in self.saves.undelivered():
            raise self.saves.error_of(number, text, 0)

    def _admit(
        self, save: PendingSave, state_dict: Mapping[Any, Any], may_wait: bool
    ) -> tuple[StatePlan | None, SaveDecision]:
        """Agree with the other ranks; the call waits for nothing beyond the deadline that begins here."""
        deadline = time.monotonic() + self._waiting
        proposal: SaveProposal = {"failed": self.saves.undelivered()}
        plan = None
        if not may_wait and self.stager.busy:
            proposal["busy"] = True
        else:
            try:
                plan = self.stager.inspect(state_dict)
                proposal["changed"] = plan.changed
            except Exception as error:
                save.error = error  # the other ranks wait for this one, so they learn of it first
            # With max_stall_s the ranks wait before they agree, so that they give a save up together.
            if plan is not None and self.timeouts.max_stall is not None:
                plan = replace(plan, wait_until=deadline)
                if not self.stager.wait_free(deadline):
                    names = " and ".join(each.path for each in self.saves if not each.done()) or "an earlier save"
                    proposal["stalled"] = (
                        f"{self._waiting:g} s (checkpoint.max_stall_s) because {names} is still being written. Save "
                        "less often, or raise checkpoint.stager.arenas."
                    )
        return plan, self._admission.decide(save, proposal, deadline)

    def _stage(self, save: PendingSave, plan: StatePlan | None, decision: SaveDecision) -> None:
        """With one rank a failure is raised; with several the others learn of it when the attempt begins."""
        owner, save.token = "", decision["token"]
        if self._hooks is not None:
            owner, save.token = self._hooks.ownership.token, owned_token(save.token)
        save.attempt = Attempt(save.path, save.token, owner, self._fs.atomic_rename)
        try:
            if plan is None:
                raise CheckpointSaveError("The ranks agreed on a save that this one cannot take part in.")
            if plan.changed != decision["replan"]:
                plan = replace(plan, changed=decision["replan"])
            snapshot = self.stager.take(plan)
            snapshot.comparison = self.stager.compare(plan, save.number)
            save.snapshot = snapshot
        except Exception as error:
            if self.ranks.world_size == 1:
                raise
            save.error = error

    def _refuse(self, save: PendingSave, error: CheckpointError) -> tuple[Future[None], PendingSave]:
        """A save that failed before anything was copied: raise, or give futures that have failed."""
        given_up = self._failures.add(error)
        if not self._policy.warn:
            raise given_up or error
        if given_up is not None and self.ranks.world_size == 1:
            raise given_up
        save.begun = False
        self._fail(save, error, given_up)
        self.saves.append(save)  # with several ranks what must be raised comes at the next save, on all
        return _failed(error), save

    def _finish(self, save: PendingSave) -> None:
        """On the save thread: all attempts of a save, and its end."""
        report = None
        while report is None:
            try:
                report = self._transaction.run(save)
            except BaseException as error:
                if not self._retries.prepare_next(save, error):
                    save.release()
                    self._fail(save, error, self._failures.add(error))
                    return
        save.release()
        if self._failures.count:
            self._failures.reset()
        self.last_report = report
        save.finish(report)
        if self._hooks is not None and self.ranks.is_leader:
            notify(self._hooks.after_save, save.path)

    def _fail(self, save: PendingSave, error: BaseException, given_up: BaseException | None) -> None:
        """End a failed save: with its error, or with the one that says that there were too many."""
        tolerated = self._policy.warn and given_up is None
        if tolerated:
            logger.warning("%s was not saved, and training goes on (checkpoint.on_error=warn): %s", save.path, error)
        else:
            logger.error("%s was not saved: %s", save.path, given_up or error)
        outcome = "skipped" if self._policy.warn and is_stall(error) else "failed"
        save.fail(given_up or error, tolerated=tolerated, outcome=outcome)
        if tolerated and not self.caller.in_other_process:
            self.last_report = save.report

    def _drain(self) -> None:
        limit = self.timeouts.whole_save * sum(not save.done() for save in self.saves) + self.timeouts.close
        if wait_futures(self.saves, timeout=limit).not_done:
            raise CheckpointTimeoutError(
                f"A save was still running {limit:g} s after close(); see timeouts.stage and timeouts.write."
            )
        if self._last_task is not None and wait_futures([self._last_task], timeout=self.timeouts.close).not_done:
            text = "deleting old checkpoints took longer than %g s (timeouts.close); it ends with this process"
            logger.warning(text, self.timeouts.close)


def _failed(error: Exception | None) -> Future[None]:
    staged: Future[None] = Future()
    staged.set_exception(error)
    return staged


def _close_if_alive(pipeline: weakref.ref[SavePipeline]) -> None:
    alive = pipeline()
    if alive is not None:
        alive.close()
