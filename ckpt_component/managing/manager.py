"""The checkpoint manager of a training loop: it decides when to save, what to keep, and where to resume."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, cast

from ..background.exports import BackgroundExports
from ..background.uploads import BackgroundUploads
from ..checkpointer import Checkpointer
from ..core.processes.home_process import HomeProcess
from ..errors import CheckpointBusyError, CheckpointError, CheckpointStepError, CheckpointTimeoutError
from ..events import CheckpointListener, SaveReport
from ..saving.in_flight import InFlightSaves, SaveHandle
from ..saving.pipeline import SavePipeline
from .policies import SavePolicy, checked_step, refuse_earlier
from .restore import Restorer
from .run_context import RunContext, job_ranks
from .run_progress import LastStep, RunProgress
from .save_clock import SaveClock
from .stop_signals import LAST_SAVE, REQUEUE_EXIT_CODE, StopSignals, checked_signals
from .summary import contents_text, saves_text

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves, keeps and restores the checkpoints of one run. A context manager.

    In a child of `os.fork`, what saves, loads or waits raises CheckpointError; `close` and the `with` block do nothing.

    Args:
        checkpointer: saves and loads; owned and closed by the manager. None: nothing is saved or restored
            (`checkpoint=off`).
        run: the folder of the checkpoints, the ranks, and deadlines.
        save: when to save.
        restorer: loads the checkpoint that the run begins with; None without a checkpointer.
        overlap: what to do with a save while earlier ones use all memory: `wait`, `skip` or `error`.
        exports: exports committed checkpoints; called by the hooks of the run, and ended by the manager. None: nothing
            is exported by this rank.
        uploads: uploads committed checkpoints, in the same way; started when the run has begun.
        preset: name of the preset, for `repr`; None: unknown.

    Attributes:
        reports: one `SaveReport` per ended or skipped save, in order.
        idle: set by `close`: the restored step, if no step came after it, so that nothing was trained.
        stopped_by: the signal by which `should_stop` ends the loop, or None.
    """

    def __init__(
        self,
        checkpointer: Checkpointer | None,
        run: RunContext,
        save: SavePolicy,
        restorer: Restorer | None,
        overlap: str,
        exports: BackgroundExports | None = None,
        uploads: BackgroundUploads | None = None,
        preset: str | None = None,
    ) -> None:
        self._home = HomeProcess("manager")
        self._checkpointer = checkpointer
        self._run = run
        self._ranks = run.ranks
        self._timeouts = run.timeouts
        self._save_policy = save
        self._overlap = overlap
        self._clock = SaveClock(save, run.ranks, run.timeouts.waiting)
        self._progress = RunProgress()
        self._newest: SaveHandle | None = None
        self._saved_step: int | None = None
        #: The step of the run's own folder that it began with, until its first step.
        self._began_at: int | None = None
        self._closed = False
        self._failed = False
        self._exports = exports
        self._uploads = uploads
        self._preset = preset
        self.reports: list[SaveReport] = []
        self.idle: int | None = None
        self._saves = InFlightSaves()
        self._signals: StopSignals | None = None
        self.stopped_by: signal.Signals | None = None
        if checkpointer is None or restorer is None:
            return
        self._restorer = restorer
        self._pipeline = cast(SavePipeline, checkpointer.saver)  # a manager is never built with third-party parts
        self._saves, self.reports = self._pipeline.saves, self._pipeline.reports

    def __repr__(self) -> str:
        if not self.enabled:
            return "<CheckpointManager: off>"
        parts = [contents_text(self._run, self.reports), self._preset, "closed" if self._closed else None]
        return f"<CheckpointManager: {', '.join(filter(None, parts))}>"

    @property
    def enabled(self) -> bool:
        """Whether the manager saves and restores anything."""
        return self._checkpointer is not None

    @property
    def restored_from(self) -> str | None:
        """The path of the checkpoint that `restore` loaded, or tried last if it failed; None: there was none."""
        return self._restorer.path if self.enabled else None

    def path_of(self, step: int) -> str:
        """Where the checkpoint of a step is, or would be; of two places that have it, the nearest."""
        path, remote = self._run.path_of(checked_step(step)), self._run.remote
        if remote is None or self._run.fs.is_folder(path):
            return path
        farther = remote.path_of(step)
        return farther if remote.fs.is_folder(farther) else path

    def steps(self) -> list[int]:
        """The steps of committed checkpoints, oldest first."""
        return self._run.scan_all(warns=True).committed

    def best_steps(self) -> list[int]:
        """The steps of committed checkpoints with the metric of `keep.best`, the best first; none without one."""
        return self._run.best_of(self._run.scan_all(warns=True))

    def guard(self, optimizer: Any) -> None:
        """Make `optimizer.step()` wait for a snapshot that is still being copied. Only `zero_overhead` needs it.

        Args:
            optimizer: a torch optimizer, a list of them, or a wrapper with the attribute `optimizer`.
        """
        if self._checkpointer is not None:
            self._checkpointer.guard(optimizer)

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the tensors of the last save may be changed."""
        if self._checkpointer is not None:
            self._checkpointer.wait_staged(timeout)

    def restore(
        self,
        state: dict[str, Any],
        *,
        strict: bool = True,
        allow_dtype_cast: bool = False,
        rename: Mapping[str, str] | None = None,
        prefix: str = "",
        ignore: Sequence[str] = (),
    ) -> int | None:
        """Load the checkpoint chosen by `resume` into `state`, in place.

        First waits for the saves of this manager that are running, and for a checkpoint that the writer process of a
        dead run is still finishing, and deletes the unfinished files of dead runs on this host. If the newest
        checkpoint is damaged, logs an error and loads the one before, unless `resume` names its step. Then plans and
        allocates memory for saves (`prewarm`), if the policy makes any.

        Args:
            state: as for `save`; its objects are given their state.
            strict: raise if the state has keys that the checkpoint lacks; False: warn once, with the keys.
            allow_dtype_cast: let the state's tensors take values of another dtype.
            rename: other keys for a checkpoint that `resume` names by step or path, as for `Checkpointer.load`. This
                and the next two override `checkpoint.load`, and are not used for the run's own newest checkpoint.
            prefix: as for `Checkpointer.load`.
            ignore: as for `Checkpointer.load`.

        Returns:
            The step that was loaded, or None if the run starts from scratch. 0 for a checkpoint whose path has no step.

        Raises:
            CheckpointNotFoundError: there is no checkpoint as `resume` asks for, or only under other names.
            CheckpointWorldError: the process group is not the one that the manager was built with.
            CheckpointExistsError: checkpoints follow the one that `resume` names, and saves would collide with them.
            CheckpointStageError: the state has a value that cannot be saved, by key.
            CheckpointCorruptError: every checkpoint that may be used is damaged.
            CheckpointLoadError: the checkpoint does not fit the state.
            CheckpointTimeoutError: a save of this manager hung; see timeouts.write.
        """
        self._home.check()
        if self._checkpointer is None:
            if os.environ.get("RANK", "0") == "0":
                logger.info("checkpoint.enabled=false: nothing is restored")
            return None
        self._ranks.check_world()
        self._wait_for_own_saves()
        names = {"rename": rename, "prefix": prefix, "ignore": ignore}
        options = {name: value for name, value in names.items() if value}
        step = self._restorer.load(state, strict, allow_dtype_cast, options)
        self._saved_step = self._began_at = step if self._restorer.is_here else None
        self._newest = None
        if step is not None:
            self._ranks.resumed(step)
            self._clock.restart()
            self._progress.restored = step
            if self._save_policy.enabled and self._progress.last is None:
                self._prewarm_loaded(state)
        self._begin_uploads(step)
        return step

    def _wait_for_own_saves(self) -> None:
        """Wait for the saves in flight, so that the newest of them counts. The error of one is raised later."""
        running = [save.step for save in self._saves if not save.done()]
        if running and self._ranks.is_leader:
            logger.info("waiting for the save of step %s of this run", running[-1])
        self._saves.wait(self._timeouts.whole_save)

    def _begin_uploads(self, step: int | None) -> None:
        if self._uploads is not None:
            self._uploads.start(step or 0)

    def begin_at(self, step: int) -> None:
        """Instead of `restore`, for a program that has loaded a checkpoint of `dir` by itself, or started from scratch.

        Cleans up after dead runs, verifies the checkpoint, and retires those that follow it if `rewind` is set.

        Args:
            step: the step of the checkpoint; 0: from scratch.

        Raises:
            CheckpointCorruptError: it is damaged; set aside if there is an older one, from which to resume instead.
            CheckpointExistsError: checkpoints follow, and saves would collide with them.
        """
        self._home.check()
        if self._checkpointer is None:
            return
        step = checked_step(step)
        self._ranks.check_world()
        self._wait_for_own_saves()
        self._saved_step = self._began_at = step if self._restorer.begin(step) else None
        self._newest = None
        self._ranks.resumed(step)
        self._begin_uploads(step)

    def add_listener(self, listener: CheckpointListener) -> None:
        """Call a listener for the saves and restores from now on; see `CheckpointListener`.

        Raises:
            CheckpointTypeError: it is none.
        """
        if self._checkpointer is not None:
            self._checkpointer.add_listener(listener)

    def maybe_save(self, step: int, state: Mapping[Any, Any], *, metrics: Mapping[str, Any] | None = None) -> bool:
        """Save if the policy says so. Call this after every step. Returns whether a save was started.

        Args:
            step: the step just done.
            state: nested dicts of tensors, plain values, and objects with `state_dict()`. The manager keeps a
                reference to it, for the save at the end.
            metrics: as for `save`; used if this step is saved.

        Raises:
            CheckpointWorldError: the process group is not the one that the manager was built with.
            CheckpointError: the save failed, or an earlier one did and its error was not raised yet. With several ranks
                it is raised at the next save, on all of them.
        """
        step = self._reached(step, state, metrics)
        if self._ranks.world_size == 1:
            self._saves.raise_first()
        if self._checkpointer is None:
            return False
        self._ranks.check_world()
        try:
            due = self._clock.is_due(step)
        except CheckpointTimeoutError as error:
            if self._timeouts.max_stall is None or not self._pipeline.policy.warn:
                raise
            return self._skip(step, f"{error} (checkpoint.max_stall_s)")
        if not due and self._save_policy.repeats:
            self._pipeline.foresight.look(state)
        return due and self.save(step, state, metrics=metrics)

    def save(self, step: int, state: Mapping[Any, Any], *, metrics: Mapping[str, Any] | None = None) -> bool:
        """Save now. Returns whether a save was started.

        None is started if the step is saved already, if `overlap: skip` applies, or if it could not begin and
        `on_error` is `warn`; the last two cases are in `reports`.

        Args:
            step: the step just done.
            state: as for `maybe_save`.
            metrics: numbers by name, such as `{"val_loss": 0.5}`, which the checkpoint keeps for `keep.best`. Of
                several ranks, what rank 0 passes counts.

        Raises:
            CheckpointBusyError: `overlap: error`, and an earlier save is still running.
            CheckpointExistsError: an older run saved this step, or later ones.
            CheckpointStepError: the step is not a valid step, or before the one that this run restored from `dir` or
                saved last; whatever `on_error` says.
            CheckpointTypeError: the metrics are not numbers by name.
            CheckpointError: this save or an earlier one failed.
        """
        step = self._reached(step, state, metrics)
        newest = self._newest
        refuse_earlier(step, self._saved_step, "restored" if newest is None else "saved last")
        failed = newest is not None and newest.done() and newest.report.outcome != "committed"
        if self._checkpointer is None or (step == self._saved_step and not failed):
            return False
        if self._closed:
            raise CheckpointError("This manager is closed; build a new one to save again.")
        before, self._clock.last_save = self._clock.last_save, time.monotonic()
        try:
            path, may_wait = self._run.path_of(step), self._overlap == "wait"
            _, save = self._pipeline.save(state, path, step=step, metrics=metrics, may_wait=may_wait)
        except CheckpointBusyError as error:
            self._clock.last_save = before
            text = f"step {step} came while an earlier save was still running"
            if self._overlap == "error":
                raise CheckpointBusyError(
                    f"{text}; use checkpoint.overlap=wait or skip, or save less often."
                ) from error
            return self._skip(step, f"{text} (checkpoint.overlap=skip)")
        self._saved_step, self._newest = step, save
        return save.begun and (self._pipeline.caller.in_other_process or save.report.outcome == "committed")

    def _reached(self, step: int, state: Mapping[Any, Any], metrics: Mapping[str, Any] | None) -> int:
        """The loop has reached a step; it is checked, noted, and returned."""
        self._home.check()
        step = checked_step(step)
        self._progress.last = LastStep(step, state, metrics)
        self._ranks.at_step(step)
        if self._checkpointer is not None:
            self._run.events.step_ended(step)
            self._delete_old()
        return step

    def _delete_old(self) -> None:
        """After the first step, on the save thread, delete what dead runs have left and `keep` no longer keeps.

        Not in `restore`: a script that evaluates restores too, and may have other values of `keep`.
        """
        began_at, self._began_at = self._began_at, None
        if began_at is not None and self._save_policy.enabled and self._ranks.is_leader:
            self._pipeline.run_after_saves(partial(self._restorer.delete_old, began_at))

    def _prewarm_loaded(self, state: Mapping[Any, Any]) -> None:
        """Prewarm after a restore, but not from scratch: the optimizer's first step changes the plan."""
        try:
            self.prewarm(state)
        except CheckpointError as error:
            if not self._pipeline.policy.warn:
                raise
            logger.warning("the first save will fail (checkpoint.on_error=warn): %s", error)

    def _skip(self, step: int, text: str) -> bool:
        logger.warning("step %d is skipped: %s", step, text)
        report = SaveReport(path=self._run.path_of(step), outcome="skipped", step=step, error=text, time=time.time())
        self._pipeline.add_report(report)
        return False

    def prewarm(self, state: Mapping[Any, Any]) -> None:
        """Plan and allocate memory for this state, so that the first save is as fast as others."""
        self._home.check()
        if self._checkpointer is not None:
            self._checkpointer.prewarm(state)

    def stop_on_signal(self, *signals: signal.Signals, requeue_exit_code: int = REQUEUE_EXIT_CODE) -> None:
        """Until `close`, catch signals for `should_stop`, instead of being ended by them.

        Call this on every rank, in the main thread. A SIGINT after another signal ends the process at once.

        Args:
            *signals: which to catch; none named: SIGTERM, SIGINT, SIGUSR1 and SIGUSR2.
            requeue_exit_code: see `exit_if_stopped`.
        """
        self._home.check()
        numbers = checked_signals(signals, requeue_exit_code)
        if self._signals is not None or self._closed:
            return
        # Without a checkpointer the ranks agree on nothing else, so there is no coordinator.
        ranks, own = (self._ranks, False) if self.enabled else (job_ranks("stop_signals", self._timeouts), True)
        self._signals = StopSignals(ranks, self._timeouts.stage, numbers, requeue_exit_code, owns_ranks=own)

    def should_stop(self) -> bool:
        """Whether a signal asks to stop; the same on all ranks. Call this once after every step.

        If True, leave the loop: the end of the `with` block then saves the last step passed to `maybe_save`, whatever
        `save.at_end` says, within `timeouts`. It takes about a second and a step to react to a signal.

        Raises:
            CheckpointError: `stop_on_signal` was not called.
            CheckpointTimeoutError: a rank did not call in time.
            RanksError: a rank is dead, or has continued without the call.
        """
        self._home.check()
        if self._signals is None:
            raise CheckpointError("Call stop_on_signal() before the loop; should_stop() reports what it notes.")
        self.stopped_by = self._signals.agreed()
        return self.stopped_by is not None

    def exit_if_stopped(self) -> None:
        """After the `with` block: if a signal ended the loop, end the process with an exit code for its scheduler.

        After SIGTERM, SIGINT, SIGHUP and SIGQUIT it is 128 + the signal, after any other, which is a warning, it is
        `requeue_exit_code`. A handler that the signal had before is called first; that of submitit requeues the job.

        Raises:
            SystemExit: a signal ended the loop.
            CheckpointError: the manager is not closed yet, so the last step is not saved.
        """
        if not self._home.is_here:
            return
        if not self._closed:
            raise CheckpointError("Call exit_if_stopped() after the manager's with block, which saves the last step.")
        if self._signals is not None:
            self._signals.exit()

    def wait(self) -> None:
        """Wait until every save that was started is committed, or raise the error of one that failed.

        Raises:
            CheckpointTimeoutError: a save hung; see timeouts.write.
        """
        self._home.check()
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def close(self) -> None:
        """Finish the saves in flight and free all resources; starts no save. Bounded; safe to call twice.

        Raises:
            CheckpointError: an earlier save failed, and its error was not raised yet.
        """
        if self._closed or not self._home.is_here:
            return
        self._closed = True
        self._warn_if_idle()
        self._progress = RunProgress()  # refers to the state
        self._began_at = None
        try:
            if self._checkpointer is not None:
                self._checkpointer.close()
                self._log_saves()
        except BaseException:
            self._failed = True
            raise
        finally:
            try:
                finish = not self._failed and self.stopped_by is None
                for background in (self._exports, self._uploads):
                    if background is not None:
                        background.end(finish=finish)
            finally:
                if self._signals is not None:
                    self._signals.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._home.is_here:
            return
        if error is not None:
            self._failed = True
            self._progress.restored = None  # the loop may have failed before its first step
            try:
                self.close()
            except CheckpointError as failure:
                # The exception of the loop propagates; this one must not hide it.
                logger.error("while closing the checkpoint manager: %s", failure)
            return
        try:
            if (self._save_policy.at_end or self.stopped_by is not None) and self._progress.last is not None:
                self._save_last(*self._progress.last)
        finally:
            self.close()

    def _log_saves(self) -> None:
        text = saves_text(self._run, self.reports) if self._ranks.is_leader else None
        if text is not None:
            logger.info(text)

    def _warn_if_idle(self) -> None:
        self.idle = self._progress.idle if self._save_policy.enabled else None  # an evaluation has no steps
        if self.idle is not None and self._ranks.is_leader:
            logger.warning(
                "restored step %d from %s and saw no further step: nothing was trained", self.idle, self._run.root
            )

    def _save_last(self, step: int, state: Mapping[Any, Any], metrics: Mapping[str, Any] | None) -> None:
        """Save the last step, even if `overlap` is `skip` or an earlier save has failed."""
        if self.stopped_by is not None and self.enabled and self._ranks.is_leader:
            logger.info(LAST_SAVE, self.stopped_by.name, step, max(self._run.scan(warns=True).committed, default=0))
        self._saves.wait(self._timeouts.whole_save)
        failed = [save for save in self._saves if save.undelivered is not None]
        for save in failed:
            save.deliver()
        try:
            self.save(step, state, metrics=metrics)
        except CheckpointStepError as error:
            if self.stopped_by is None:
                raise
            # Stopped while it repeats steps: the exit code must not change, because a later checkpoint is there.
            logger.warning("the last step is not saved: %s", error)
        finally:
            if failed:
                failed[0].result(0)  # the errors of the others are in the log and in the reports
