"""Takes saves from the training thread, and brings them to their end on a thread of its own, in order.

So the training thread never waits for storage, and the commit never needs the training thread.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from dataclasses import replace
from typing import Any

from ..callers.write_callers import WriteCaller
from ..coordination import Coordinator
from ..errors import (
    CheckpointBusyError,
    CheckpointError,
    CheckpointSaveError,
    CheckpointStallError,
    CheckpointTimeoutError,
)
from ..formats.base import Writer
from ..stagers.base import Snapshot, Stager, StatePlan
from ..storage.commit import Attempt
from ..storage.fencing import Ownership
from ..storage.fs import FsOps
from ..storage.names import owned_token
from .admission import Agreement, Proposal, Schedule
from .failures import ErrorPolicy, FailureCount, is_stall
from .report import SaveFuture, Timeouts
from .retry import Tries
from .transaction import AttemptRunner, Scheduled

logger = logging.getLogger(__name__)


class EarlierSaveFailed(Exception):
    """All ranks agreed to tell of an earlier save first: its number, and why it failed."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class Saver:
    """Stages, writes and commits state dicts, one after the other.

    Args:
        stager: connected; owned by the saver from now on.
        caller: who runs the write job; connected, and owned too.
        writer: the format, for block size and name.
        ranks: how the ranks agree; owned too.
        fs: where effects go.
        timeouts: deadlines.
        policy: what to do about saves that fail.
    """

    def __init__(
        self,
        stager: Stager,
        caller: WriteCaller,
        writer: Writer,
        ranks: Coordinator,
        fs: FsOps,
        timeouts: Timeouts,
        policy: ErrorPolicy,
    ) -> None:
        self.stager = stager
        self.caller = caller
        self.ranks = ranks
        self.timeouts = timeouts
        self._fs = fs
        self._policy = policy
        self._failures = FailureCount(policy.give_up_after)
        self._schedule = Schedule(ranks, bounded=timeouts.max_stall is not None, by_rename=fs.atomic_rename)
        self._runner = AttemptRunner(caller, writer, ranks, fs, timeouts, policy.min_free_bytes)
        self._tries = Tries(self._runner, ranks, policy, timeouts.stage)
        self._after_commit: Callable[[str], None] | None = None
        self._after_save: Callable[[str], None] | None = None
        self._last_task: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-save")
        self._closing = threading.Lock()
        self._closed = False
        self._in_flight: list[SaveFuture] = []
        # A script that forgets close(): the interpreter first lets the save thread finish, then runs this.
        self._at_exit = atexit.register(_close_if_alive, weakref.ref(self))

    def save(
        self,
        state_dict: Mapping[Any, Any],
        path: str,
        untold: Mapping[int, str] | None = None,
        *,
        may_wait: bool = True,
    ) -> tuple[Future[None], SaveFuture]:
        """Take a snapshot now, and write and commit it in the background.

        Args:
            state_dict: what to save.
            path: absolute path of the checkpoint to be; taken paths are refused.
            untold: earlier saves that failed without anybody being told, by number.
            may_wait: False: raise instead of waiting for an earlier save's memory.

        Returns:
            (staged, saved): done when training may change the tensors; with the `SaveReport` when it is committed. With
            `on_error: warn` a save that could not begin gives two that have failed, instead of an error.

        Raises:
            EarlierSaveFailed: a rank has an untold failure; nothing was begun.
            CheckpointBusyError: a rank would have to wait; nothing was begun.
            CheckpointWorldError: the ranks are others than those that this was built for.
            CheckpointError: it could not begin; with several ranks on all of them.
        """
        if self._closed:
            raise CheckpointError("This checkpointer is closed; build a new one to save again.")
        self.ranks.world.check()
        self.ranks.world.warn_if_alone()
        started = time.perf_counter()
        self._in_flight = [future for future in self._in_flight if not future.done()]
        try:
            plan, error, agreed = self._agree(state_dict, path, untold or {}, may_wait)
            snapshot, error = self._take(plan, agreed.replan, error)
        except (EarlierSaveFailed, CheckpointBusyError):
            raise
        except CheckpointError as failure:
            return self._not_begun(path, failure)
        future = SaveFuture(path, self._schedule.number)
        future.set_running_or_notify_cancel()
        staged: Future[None] = Future() if snapshot is None else snapshot.staged
        if snapshot is None:
            staged.set_exception(error)
        owner, token = "", agreed.token
        if self._runner.ownership is not None:
            owner, token = self._runner.ownership.token, owned_token(token)
        attempt = Attempt(path, token, owner, self._fs.atomic_rename)
        scheduled = Scheduled(attempt, snapshot, error, started)
        self._in_flight.append(future)
        self._last_task = self._thread.submit(self._finish, scheduled, time.perf_counter() - started, future)
        return staged, future

    def own(
        self,
        ownership: Ownership,
        admit: Callable[[str], None],
        after_commit: Callable[[str], None],
        after_save: Callable[[str], None],
    ) -> None:
        """Save only while this run owns the folder of checkpoints. The calls take a checkpoint's path, on rank 0 alone.

        Args:
            ownership: of the folder.
            admit: called before a save begins; what it raises stops the save.
            after_commit: called on the saving thread before the save's future is done.
            after_save: the same, after the future is done; the next save and `close` wait for it.
        """
        self._runner.ownership, self._schedule.admit = ownership, admit
        self._after_commit, self._after_save = after_commit, after_save

    def close(self) -> None:
        """Let the saves that were started finish, then end the writer process and free the memory. Safe to call twice.

        Raises:
            CheckpointTimeoutError: a save hung; its deadline is timeouts.write.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self._at_exit)
        self._tries.hurry()
        try:
            self.stager.close()
        finally:
            try:
                self._drain()
            finally:
                self._thread.shutdown(wait=False)
                self.caller.close()
                self.ranks.close()

    def _agree(
        self, state_dict: Mapping[Any, Any], path: str, untold: Mapping[int, str], may_wait: bool
    ) -> tuple[StatePlan | None, Exception | None, Agreement]:
        """Agree with the other ranks; the call waits for nothing and nobody beyond the deadline that begins here."""
        deadline = time.monotonic() + self.timeouts.waiting
        if not may_wait and self.stager.busy:
            plan, error, mine = None, None, Proposal(path, untold=untold, busy=True)
        else:
            plan, error = self._inspect(state_dict)
            stalled = None if error is not None else self._wait_for_memory(deadline)
            mine = Proposal(path, plan is not None and plan.changed, error, untold, stalled=stalled)
        agreed = self._within_stall(lambda: self._schedule.agree(mine, deadline), path)
        if agreed.untold is not None:
            raise EarlierSaveFailed(*agreed.untold)
        if agreed.busy:
            raise CheckpointBusyError(f"{path} came while an earlier save was still running")
        if plan is not None and self.timeouts.max_stall is not None:
            plan = replace(plan, wait_until=deadline)
        return plan, error, agreed

    def _inspect(self, state_dict: Mapping[Any, Any]) -> tuple[StatePlan | None, Exception | None]:
        """Other ranks wait for this one, so what is wrong here is told to them and not raised at once."""
        try:
            return self.stager.inspect(state_dict), None
        except Exception as error:
            return None, error

    def _wait_for_memory(self, deadline: float) -> str | None:
        """With `max_stall_s`: wait before the ranks agree, so that they give a save up together. What was missing."""
        if self.timeouts.max_stall is None or self.stager.wait_free(deadline):
            return None
        named = " and ".join(future.path for future in self._in_flight if not future.done()) or "an earlier save"
        return (
            f"{self.timeouts.waiting:g} s (checkpoint.max_stall_s) for the memory of {named}, still being written; "
            "save less often, or raise checkpoint.stager.arenas"
        )

    def _take(
        self, plan: StatePlan | None, replan: bool, error: Exception | None
    ) -> tuple[Snapshot | None, Exception | None]:
        """With one rank a failure is raised; with several the others learn of it by this rank's vote."""
        try:
            if plan is None:
                raise CheckpointSaveError("The ranks agreed on a save that this one cannot take part in.") from error
            plan = replace(plan, changed=replan)
            snapshot = self.stager.take(plan)
            snapshot.comparison = self.stager.compare(plan, self._schedule.number)
            return snapshot, None
        except Exception as failure:
            if self.ranks.world_size == 1:
                raise
            return None, failure

    def _within_stall(self, wait: Callable[[], Agreement], path: str) -> Agreement:
        try:
            return wait()
        except CheckpointTimeoutError as error:
            if self.timeouts.max_stall is None or isinstance(error, CheckpointStallError):
                raise
            raise CheckpointStallError(
                f"{path} is not saved: {error} Training waits {self.timeouts.waiting:g} s at most "
                "(checkpoint.max_stall_s)."
            ) from error

    def _not_begun(self, path: str, error: CheckpointError) -> tuple[Future[None], SaveFuture]:
        """A save that failed before anything was copied: raise, or give futures that have failed."""
        given_up = self._failures.failed(error)
        if not self._policy.warn:
            raise given_up or error
        if given_up is not None and self.ranks.world_size == 1:
            raise given_up
        future, staged = SaveFuture(path, self._schedule.number), Future[None]()
        staged.set_exception(error)
        future.begun = False
        self._settle(future, error, given_up)  # with several ranks what must be raised comes at the next save, on all
        return staged, future

    def _settle(self, future: SaveFuture, error: BaseException, given_up: BaseException | None) -> None:
        """End the future of a failed save: with its error, or with the one that says that enough is enough."""
        tolerated = self._policy.warn and given_up is None
        skipped = self._policy.warn and is_stall(error)
        if tolerated:
            logger.warning("%s was not saved, and training goes on (checkpoint.on_error=warn): %s", future.path, error)
        else:
            logger.error("%s was not saved: %s", future.path, given_up or error)
        future.fail(given_up or error, tolerated=tolerated, outcome="skipped" if skipped else "failed")

    def _drain(self) -> None:
        running = [future for future in self._in_flight if not future.done()]
        limit = self.timeouts.whole_save * len(running) + self.timeouts.close
        if wait_futures(running, timeout=limit).not_done:
            raise CheckpointTimeoutError(
                f"A save was still running {limit:g} s after close(); see timeouts.stage and timeouts.write."
            )
        if self._last_task is not None and wait_futures([self._last_task], timeout=self.timeouts.close).not_done:
            logger.warning(
                "deleting old checkpoints took longer than %g s (timeouts.close); it ends with this process",
                self.timeouts.close,
            )

    def _finish(self, scheduled: Scheduled, stall_s: float, future: SaveFuture) -> None:
        snapshot, path = scheduled.snapshot, scheduled.attempt.target
        try:
            report = replace(self._tries.run(scheduled), stall_s=stall_s)
        except BaseException as error:
            if snapshot is not None:
                snapshot.release()
            self._settle(future, error, self._failures.failed(error))
        else:
            if snapshot is not None:
                snapshot.release()
            self._failures.succeeded()
            self._tell_commit(self._after_commit, path)
            future.set_result(report)
            self._tell_commit(self._after_save, path)

    def _tell_commit(self, call: Callable[[str], None] | None, path: str) -> None:
        if call is None or not self.ranks.leads:
            return
        try:
            call(path)
        except Exception:
            # The checkpoint is committed, whatever its owner makes of it.
            logger.exception("%s is committed, but what follows a commit failed", path)


def _close_if_alive(saver: weakref.ref[Saver]) -> None:
    alive = saver()
    if alive is not None:
        alive.close()
