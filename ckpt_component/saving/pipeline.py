"""Accepts saves on the training thread: makes the ranks agree, and takes the snapshot; a `SaveQueue` does the rest."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from ..callers.write_callers import WriteCaller
from ..core.commit.protocols import protocol_of
from ..core.outside import Future
from ..core.processes.running import OwnerProcess, refuse_at_exit
from ..errors import CheckpointError
from ..events import SaveReport
from ..formats.writer import Writer
from ..stagers.base import Stager
from .admission import SaveAdmission
from .attempts import SaveAttempts
from .context import Admitted, SaveContext, SaveRequest, Staged
from .planning import SavePlanner
from .save_queue import InFlightSaves, SaveHandle, SaveQueue

logger = logging.getLogger(__name__)


class Prewarmer:
    """Has a stager make memory for the first save, by the states of the steps before.

    It looks at the states of steps 1, 2, 4, 8 and so on, because a state may grow: an optimizer makes its moments at
    its first step, which may come late where gradients are accumulated. All ranks look at the same steps.

    Args:
        stager: makes the memory
    """

    def __init__(self, stager: Stager) -> None:
        self._stager = stager
        self._steps = 0
        self._is_over = False

    def look(self, state_dict: Mapping[Any, Any]) -> None:
        """Called with the state after a step that is not saved. Errors are warnings: the save itself raises them."""
        self._steps += 1
        if self._is_over or self._steps & (self._steps - 1):
            return
        try:
            self._stager.reserve(state_dict)
        except Exception as error:  # also what a `state_dict()` of the state raises
            self._is_over = True
            logger.warning("the first save will fail, unless the state changes: %s: %s", type(error).__name__, error)


class SavePipeline:
    """Stages, writes and commits state dicts, one after the other.

    Args:
        stager: takes the snapshots; owned by the pipeline from now on
        caller: who runs the write requests; owned too
        writer: the format
        context: what is the same for all saves
        queue: makes what completes the saves, given the arguments of `SaveQueue`

    Attributes:
        stager: see above
        caller: see above
        ranks: of the context
        policy: of the context
        events: of the context
        queue: completes the saves
        saves: running saves, and failed ones whose error was not raised yet
        reports: reports of ended saves, in order
        last_report: see `Checkpointer.last_report`
        prewarmer: prepares the first save
    """

    def __init__(
        self,
        stager: Stager,
        caller: WriteCaller,
        writer: Writer,
        context: SaveContext,
        queue: Callable[..., SaveQueue] = SaveQueue,
    ) -> None:
        caller.outside = context.ranks.outside
        caller.prepare(context.timeouts.worker_start)
        self.stager = stager
        self.caller = caller
        self.ranks = context.ranks
        self.policy = context.policy
        self.events = context.events
        self.saves = InFlightSaves(context.progress, context.ranks.outside)
        self.reports: list[SaveReport] = []
        self.last_report: SaveReport | None = None
        self.prewarmer = Prewarmer(stager)
        self._context = context
        self._single_file = writer.single_file
        self._planner = SavePlanner(stager, writer, context)
        self._admission = SaveAdmission(self._planner, stager, self.saves, context)
        self.queue = queue(
            SaveAttempts(caller, writer, context),
            context,
            in_background=caller.in_other_process,
            add_report=self.add_report,
        )
        #: Whether `last_report` has failures too: nothing else that an inline save returns tells of one.
        self._shows_failures = context.policy.warn and not caller.in_other_process
        self._owner = OwnerProcess("checkpointer")
        self._closing = context.ranks.outside.lock()
        # If a script does not call close(), the interpreter does, before it waits for the lane.
        self._at_exit = partial(_close_if_alive, weakref.ref(self))
        self.ranks.outside.at_exit(self._at_exit)

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
        storage, date = self._context.storage_of(path), self.ranks.outside.date()
        request = SaveRequest(path, storage, step, metrics, may_wait, time=date)
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
        copied = _failed(staged.error) if staged.snapshot is None else staged.snapshot.copied
        try:
            with self._closing:  # what is listed by then, `close` waits for
                self._owner.check()
                save = self.queue.submit(staged)
                self.saves.append(save)
        except (CheckpointError, RuntimeError):
            if staged.snapshot is not None:
                staged.snapshot.release()
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
        protocol = protocol_of(request.storage)
        attempt = protocol.attempt(request.path, admitted.token, owner, self._single_file)
        snapshot, comparison, failure = None, None, None
        try:
            plan = self._planner.share(replace(admitted.plan, storage=request.storage))
            snapshot = self.stager.take(plan)
            if self._planner.comparisons is not None:
                comparison = self._planner.comparisons.compare(plan, admitted.number)
        except Exception as error:
            if self.ranks.world_size == 1:
                raise
            failure = error
            if snapshot is not None:
                snapshot.release()
                snapshot = None
        stall_s = perf_counter() - request.started
        return Staged(admitted, attempt, snapshot, failure, comparison, self.stager.host_bytes, stall_s)

    def _refuse(self, request: SaveRequest, error: CheckpointError) -> tuple[Future[None], SaveHandle]:
        """End a save that failed before anything was copied: raise, or return failed futures."""
        save = self.queue.refuse(request, error)
        self.saves.append(save)
        return _failed(error), save

    def add_report(self, report: SaveReport) -> None:
        """Keep and record the report of a save that has ended, or that was skipped before it was begun."""
        self.reports.append(report)
        if (report.outcome == "committed" and not report.memory) or self._shows_failures:
            self.last_report = report
        self.events.saved(report)

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
        self.saves.wait(self._context.timeouts.whole_save)
        self.events.drain(self._context.timeouts.close)
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
        self.queue.retries.stop_pausing()
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
        self.ranks.outside.not_at_exit(self._at_exit)
        self.events.close(self._context.timeouts.close)
        self.queue.close(wait=is_idle)
        self.caller.close(self._context.timeouts.close)
        self._context.reuse.close()
        self.ranks.close()

    def _drain(self) -> bool:
        """Wait until the save thread has nothing to do. Returns whether that is so."""
        limit = self._context.timeouts.close
        self.saves.wait(self._context.timeouts.whole_save + limit)
        if not self.queue.drain(limit):
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
