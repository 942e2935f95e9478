"""What a training loop holds: it decides when to save, what to keep, and where to resume."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, cast

from ..checkpointer import Checkpointer
from ..coordination import StepQuestions
from ..errors import CheckpointBusyError, CheckpointError, CheckpointTimeoutError
from ..saving.in_flight import InFlightSaves, PendingSave
from ..saving.pipeline import SavePipeline
from ..saving.report import SaveReport
from .policies import SavePolicy, checked_step
from .restore import Restorer
from .run_context import RunContext, job_ranks
from .stop_signals import StopSignals

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves, keeps and resumes the steps of one run. A context manager.

    Args:
        checkpointer: does the saving; owned and closed by the manager. None: nothing is saved or restored
            (`checkpoint=off`).
        run: the folder of the checkpoints, the ranks, and deadlines.
        save: when to save.
        restorer: loads what the run begins with; None without a checkpointer.
        overlap: what to do when a save comes while earlier ones hold all memory: `wait`, `skip` or `error`.

    Attributes:
        reports: one `SaveReport` per ended or skipped save, in order.
        idle: set by `close`: the step that was restored when none came after it, so that nothing was trained.
        stopped_by: the signal by which `should_stop` ends the loop, or None.
    """

    def __init__(
        self,
        checkpointer: Checkpointer | None,
        run: RunContext,
        save: SavePolicy,
        restorer: Restorer | None,
        overlap: str,
    ) -> None:
        self._checkpointer = checkpointer
        self._run = run
        self._ranks = run.ranks
        self._timeouts = run.timeouts
        self._save_policy = save
        self._overlap = overlap
        self._last_save = time.monotonic()
        self._seen: tuple[int, Mapping[Any, Any]] | None = None
        self._newest: PendingSave | None = None
        self._saved_step: int | None = None
        self._restored: int | None = None
        self._closed = False
        self._due = StepQuestions(self._ranks, "maybe_save")
        self.reports: list[SaveReport] = []
        self.idle: int | None = None
        self._saves = InFlightSaves()
        self._signals: StopSignals | None = None
        self.stopped_by: signal.Signals | None = None
        if checkpointer is None or restorer is None:
            return
        self._restorer = restorer
        self._pipeline = cast(SavePipeline, checkpointer.saver)  # a manager is built with parts of ours
        self._saves, self.reports = self._pipeline.saves, self._pipeline.reports

    @property
    def enabled(self) -> bool:
        """Whether anything is saved at all."""
        return self._checkpointer is not None

    def path_of(self, step: int) -> str:
        """Where the checkpoint of a step is, or would be."""
        return self._run.path_of(checked_step(step))

    def steps(self) -> list[int]:
        """The steps of committed checkpoints, oldest first."""
        return self._run.committed()

    def guard(self, optimizer: Any) -> None:
        """Let `optimizer.step()` wait for a snapshot that is still being copied. Needed by `zero_overhead` alone.

        Args:
            optimizer: a torch optimizer, a list of them, or a wrapper with the attribute `optimizer`.
        """
        if self._checkpointer is not None:
            self._checkpointer.guard(optimizer)

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when the tensors of the last save may be changed."""
        if self._checkpointer is not None:
            self._checkpointer.wait_staged(timeout)

    def restore(self, state: dict[str, Any], *, strict: bool = True, allow_dtype_cast: bool = False) -> int | None:
        """Load the checkpoint that `resume` says into `state`, in place.

        First waits for a checkpoint that the writer process of a dead run is still finishing, and deletes what dead
        runs of this host left half-done. A newest checkpoint that is damaged is passed over, loudly, unless `resume`
        names its step. Then plans and takes memory for the saves to come (`prewarm`), where the policy makes any.

        Args:
            state: as for `save`; its objects get their state back.
            strict: raise when the state has keys that the checkpoint lacks; False: one warning says which.
            allow_dtype_cast: let the state's tensors take values of another dtype.

        Returns:
            The step that was loaded, or None when the run starts from scratch. 0 for a checkpoint that was named by a
            path without a step.

        Raises:
            CheckpointNotFoundError: `resume` asks for what is not there, or what is there has other names.
            CheckpointWorldError: the ranks are others than those that the manager was built for.
            CheckpointExistsError: checkpoints follow the one that `resume` names, which saves would meet.
            CheckpointStageError: the state has a value that cannot be saved, by key.
            CheckpointCorruptError: no checkpoint that may be used is whole.
            CheckpointLoadError: the checkpoint is another model's.
        """
        if self._checkpointer is None:
            if os.environ.get("RANK", "0") == "0":
                logger.info("checkpoint.enabled=false: nothing is restored")
            return None
        self._ranks.check_world()
        step = self._restorer.load(state, strict, allow_dtype_cast)
        if step is not None:
            self._ranks.resumed(step)
            self._due.restart(self._ranks.meetings["restore"])
            self._restored = step
            here = os.path.realpath(self._restorer.loaded or "") == os.path.realpath(self.path_of(step))
            self._saved_step, self._newest = step if here else None, None
            self._last_save = time.monotonic()
            if self._save_policy.enabled and self._seen is None:
                self._prewarm_loaded(state)
        return step

    def maybe_save(self, step: int, state: Mapping[Any, Any]) -> bool:
        """Save when the policy says so. Call it after every step. Returns whether a save was started.

        Args:
            step: the step just done.
            state: nested dicts of tensors, plain values, and objects with `state_dict()`. The manager keeps a
                reference to it, for the save at the end.

        Raises:
            CheckpointWorldError: the ranks are others than those that the manager was built for.
            CheckpointError: also what went wrong in an earlier save and was not raised yet; with several ranks at the
                next save, on all of them.
        """
        step = checked_step(step)
        self._seen = (step, state)
        self._ranks.at_step(step)
        if self._ranks.world_size == 1:
            self._saves.raise_first()
        if self._checkpointer is None:
            return False
        self._ranks.check_world()
        try:
            due = self._is_due(step)
        except CheckpointTimeoutError as error:
            if self._timeouts.max_stall is None or not self._pipeline.policy.warn:
                raise
            return self._skip(step, f"{error} (checkpoint.max_stall_s)")
        return due and self.save(step, state)

    def _is_due(self, step: int) -> bool:
        policy = self._save_policy
        if self._ranks.world_size == 1 or policy.every_seconds is None:
            return policy.should_save(step, time.monotonic() - self._last_save)
        # The ranks' clocks differ, so rank 0's is asked.
        deadline, since = time.monotonic() + self._timeouts.waiting, self._last_save
        return bool(self._due.ask(step, lambda: policy.should_save(step, time.monotonic() - since), deadline))

    def save(self, step: int, state: Mapping[Any, Any]) -> bool:
        """Save now. Returns whether a save was started.

        It is not when the step is saved already, when `overlap: skip` says so, and with `on_error: warn` when it could
        not begin; the last two are in `reports`.

        Raises:
            CheckpointBusyError: `overlap: error` and an earlier save still runs.
            CheckpointExistsError: an older run saved this step, or later ones.
            CheckpointStepError: the step is no step.
            CheckpointError: what went wrong, also in an earlier save.
        """
        step = checked_step(step)
        self._seen = (step, state)
        self._ranks.at_step(step)
        newest = self._newest
        failed = newest is not None and newest.done() and newest.report.outcome != "committed"
        if self._checkpointer is None or (step == self._saved_step and not failed):
            return False
        if self._closed:
            raise CheckpointError("This manager is closed; build a new one to save again.")
        before, self._last_save = self._last_save, time.monotonic()
        try:
            _, save = self._pipeline.save(state, self.path_of(step), step=step, may_wait=self._overlap == "wait")
        except CheckpointBusyError as error:
            self._last_save = before
            text = f"step {step} came while an earlier save was still running"
            if self._overlap == "error":
                raise CheckpointBusyError(
                    f"{text}; use checkpoint.overlap=wait or skip, or save less often."
                ) from error
            return self._skip(step, f"{text} (checkpoint.overlap=skip)")
        self._saved_step, self._newest = step, save
        return save.begun and (self._pipeline.caller.in_other_process or save.report.outcome == "committed")

    def _prewarm_loaded(self, state: Mapping[Any, Any]) -> None:
        """Not from scratch: then an optimizer has no state before its first step, and the plan would be another."""
        try:
            self.prewarm(state)
        except CheckpointError as error:
            if not self._pipeline.policy.warn:
                raise
            logger.warning("the first save is going to fail (checkpoint.on_error=warn): %s", error)

    def _skip(self, step: int, text: str) -> bool:
        logger.warning("step %d is skipped: %s", step, text)
        self.reports.append(SaveReport(path=self.path_of(step), outcome="skipped", step=step, error=text))
        return False

    def prewarm(self, state: Mapping[Any, Any]) -> None:
        """Plan and take memory for this state, so that the first save costs what others do."""
        if self._checkpointer is not None:
            self._checkpointer.prewarm(state)

    def stop_on_signals(self) -> None:
        """From now on and until `close`, note SIGTERM, SIGINT and SIGUSR1 for `should_stop`, and do not end by them.

        Call it on every rank, in the main thread. A SIGINT after another of these signals ends the process at once.
        """
        if self._signals is not None or self._closed:
            return
        # Without a checkpointer the ranks agree on nothing else, and have no coordinator.
        ranks = self._ranks if self.enabled else job_ranks("stop_signals", self._timeouts)
        self._signals = StopSignals(ranks, self._timeouts.stage, owns_ranks=not self.enabled)

    def should_stop(self) -> bool:
        """Whether a signal asks to stop: the same answer on all ranks. Call it once after every step.

        When it is true, leave the loop: the end of the `with` block then saves the last step that `maybe_save` saw,
        whatever `save.at_end` says, and takes no longer than `timeouts` allow. A signal is acted upon within about a
        second and a step.

        Raises:
            CheckpointError: `stop_on_signals` was not called.
            CheckpointTimeoutError: a rank did not call in time.
            RanksError: a rank is dead, or has gone on without the call.
        """
        if self._signals is None:
            raise CheckpointError("Call stop_on_signals() before the loop; should_stop() reports what it notes.")
        self.stopped_by = self._signals.agreed()
        return self.stopped_by is not None

    def wait(self) -> None:
        """Return when every save that was started is committed, or raise what went wrong.

        Raises:
            CheckpointTimeoutError: a save hung; see timeouts.write.
        """
        self._saves.wait(self._timeouts.whole_save)
        self._saves.raise_first()

    def close(self) -> None:
        """Finish what was started and free everything; saves nothing more. Bounded; safe to call twice.

        Raises:
            CheckpointError: what went wrong in an earlier save and was not raised yet.
        """
        if self._closed:
            return
        self._closed = True
        self._warn_if_idle()
        self._seen = None
        try:
            if self._checkpointer is not None:
                self._checkpointer.close()
        finally:
            if self._signals is not None:
                self._signals.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._restored = None  # the loop may have ended before its first step
            try:
                self.close()
            except CheckpointError as failure:
                # The loop's own exception goes on; this one must not hide it.
                logger.error("while closing the checkpoint manager: %s", failure)
            return
        try:
            if (self._save_policy.at_end or self.stopped_by is not None) and self._seen is not None:
                self._save_last(*self._seen)
        finally:
            self.close()

    def _warn_if_idle(self) -> None:
        if self._restored is None or not self._save_policy.enabled:
            return  # what only evaluates has no steps
        if self._seen is None or self._seen[0] == self._restored:
            self.idle = self._restored
            if self._ranks.is_leader:
                logger.warning(
                    "restored step %d from %s and saw no further step: nothing was trained", self.idle, self._run.root
                )

    def _save_last(self, step: int, state: Mapping[Any, Any]) -> None:
        """Save the last step: `overlap` must not skip it, nor an earlier save's error keep it from being tried."""
        self._saves.wait(self._timeouts.whole_save)
        failed = [save for save in self._saves if save.undelivered is not None]
        for save in failed:
            save.delivered = True
        try:
            self.save(step, state)
        finally:
            if failed:
                failed[0].result(0)  # the errors of the others are in the log and in the reports
