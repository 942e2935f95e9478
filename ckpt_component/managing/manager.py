"""The checkpoint manager of a training loop: it decides when to save, what to keep, and where to resume."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, cast

from ..background.jobs import Follower
from ..callers.write_callers import PersistentCaller
from ..checkpointer import Checkpointer
from ..core.gc_control import collector_paused
from ..core.processes.running import OwnerProcess
from ..errors import CheckpointBusyError, CheckpointError, CheckpointStepError, CheckpointTimeoutError
from ..events import CheckpointListener, SaveReport
from ..saving.pipeline import SavePipeline
from ..saving.repeated_warning import RepeatedWarning
from ..saving.save_queue import InFlightSaves, SaveHandle
from .policies import ReachedStep, SaveClock, SavePolicy, checked_step, refuse_earlier
from .restore import Restorer
from .run_context import RunContext, job_ranks
from .stop_signals import LAST_SAVE, StoppableLoop
from .summary import contents_text, log_saves, warn_of_idle, warn_of_open, warn_of_wait

logger = logging.getLogger(__name__)


class CheckpointManager(StoppableLoop):
    """Saves, keeps and restores the checkpoints of one run. A context manager.

    Once it is closed, what saves or loads raises CheckpointError. In a child of `os.fork`, so does what waits; `close`
    and the `with` block do nothing there.

    Args:
        checkpointer: saves and loads; owned and closed by the manager. None: nothing is saved or restored
            (`checkpoint=off`).
        run: the folder of the checkpoints, the ranks, and deadlines
        save: when to save
        restorer: loads the checkpoint that the run begins with; None without a checkpointer
        followers: what works with the checkpoints, such as uploads; started when the run has begun, called by its
            hooks, and ended by the manager, in this order

    Attributes:
        reports: one `SaveReport` per ended or skipped save, in order
        idle: set by `close`: the restored step, if no step came after it, so that nothing was trained
    """

    def __init__(
        self,
        checkpointer: Checkpointer | None,
        run: RunContext,
        save: SavePolicy,
        restorer: Restorer | None,
        followers: Sequence[Follower] = (),
    ) -> None:
        # Without a checkpointer the ranks agree on nothing else, so there is no coordinator.
        alone = partial(job_ranks, "stop_signals", run.timeouts, run.ranks.outside)
        stopping = run.ranks if checkpointer is not None else alone
        super().__init__(OwnerProcess("manager"), stopping, run.timeouts.stage)
        self._checkpointer = checkpointer
        self._run = run
        self._ranks = run.ranks
        self._timeouts = run.timeouts
        self._policy = save
        self._clock = SaveClock(save, run.ranks, run.timeouts.waiting)
        #: The step that was restored, and the last one of the loop, which the save at the end takes.
        self._restored: int | None = None
        self._last: ReachedStep | None = None
        self._newest: SaveHandle | None = None
        #: The last step whose save could not begin, and the error that the caller got.
        self._refusal: tuple[int, str] | None = None
        self._saved_step: int | None = None
        #: The last step of which a snapshot was begun, in memory or in the folder.
        self._kept_step: int | None = None
        #: The step of the run's own folder that it began with, until its first step.
        self._began_at: int | None = None
        self._failed = False
        self._followers = followers
        self.reports: list[SaveReport] = []
        self.idle: int | None = None
        self._saves = InFlightSaves()
        self._skips = RepeatedWarning(logger, "steps were skipped")
        if checkpointer is None or restorer is None:
            return
        self._restorer = restorer
        self._pipeline = cast(SavePipeline, checkpointer.saver)  # a manager is never built with third-party parts
        self._saves, self.reports = self._pipeline.saves, self._pipeline.reports
        self._at_exit = partial(_warn_if_open, weakref.ref(self))
        self._ranks.outside.at_exit(self._at_exit)

    def __repr__(self) -> str:
        if not self.enabled:
            return "<CheckpointManager: off>"
        parts = [contents_text(self._run, self.reports), self._run.preset, "closed" if self._owner.closed else None]
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
        return self._run.nearest(checked_step(step))

    def steps(self) -> list[int]:
        """The steps of committed checkpoints, oldest first."""
        return self._run.scan_all().committed

    def best_steps(self) -> list[int]:
        """The steps of committed checkpoints with the metric of `keep.best`, the best first; none without one."""
        return self._run.best_of(self._run.scan_all())

    def guard(self, optimizer: Any) -> None:
        """Make `optimizer.step()` wait for a snapshot that is still being copied.

        Only `zero_overhead` needs it, and only for optimizers that are not in the state.

        Args:
            optimizer: a torch optimizer, a list of them, or a wrapper with the attribute `optimizer`
        """
        if self._checkpointer is not None:
            self._checkpointer.guard(optimizer)

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the tensors of the last save may be changed."""
        if self._checkpointer is not None:
            self._checkpointer.wait_staged(timeout)

    @collector_paused()  # a full collection, for which what a restore makes is enough, takes a third of its time
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
        checkpoint is damaged, logs an error and loads the one before, unless `resume` names its step. Then plans saves,
        if the policy makes any, and begins to allocate their memory in the background.

        Args:
            state: as for `save`; its objects are given their state. Modules on the meta device get memory; without a
                checkpoint, they stay there.
            strict: raise if the state has keys that the checkpoint lacks; False: warn once, with the keys
            allow_dtype_cast: let the state's tensors take values of another dtype
            rename: other keys for a checkpoint that `resume` names by step or path, as for `Checkpointer.load`. This
                and the next two override `checkpoint.load`, and are not used for the run's own newest checkpoint.
            prefix: as for `Checkpointer.load`
            ignore: as for `Checkpointer.load`

        Returns:
            The step that was loaded, or None if the run starts from scratch. 0 for a checkpoint whose path has no step.

        Raises:
            CheckpointNotFoundError: there is no checkpoint as `resume` asks for, or only under other names
            CheckpointWorldError: the process group is not the one that the manager was built with
            CheckpointExistsError: checkpoints follow the one that `resume` names, and saves would collide with them
            CheckpointStageError: the state has a value that cannot be saved, by key
            CheckpointCorruptError: every checkpoint that may be used is damaged
            CheckpointLoadError: the checkpoint does not fit the state, here or on another rank, which the text names
            CheckpointTimeoutError: a save of this manager hung; see timeouts.write
            RanksError: another rank is dead, or has continued without this call
        """
        self._owner.check()
        if self._checkpointer is None:
            if os.environ.get("RANK", "0") == "0":
                logger.info("checkpoint.enabled=false: nothing is restored")
            return None
        self._ranks.check_world()
        self._wait_for_own_saves()
        names = {"rename": rename, "prefix": prefix, "ignore": ignore}
        options = {name: value for name, value in names.items() if value}
        step = self._restorer.load(state, strict, allow_dtype_cast, options)
        if step is not None:
            self._clock.restart()
            self._restored = step
        self._begin(step, self._restorer.is_here, self._restorer.is_durable)
        if step is not None and self._policy.enabled and self._last is None:
            self._prewarm_loaded(state)
        return step

    def _wait_for_own_saves(self) -> None:
        """Wait for the saves in flight, so that the newest of them counts. The error of one is raised later."""
        running = [save.step for save in self._saves if not save.done()]
        if running:
            if self._ranks.is_leader:
                logger.info("waiting for the save of step %s of this run", running[-1])
            self._saves.wait(self._timeouts.whole_save)

    def _begin(self, step: int | None, is_here: bool, is_durable: bool) -> None:
        """The run begins after its own step, if `is_here`, or of another folder; None: from scratch."""
        self._began_at = step if is_here else None
        self._saved_step, self._kept_step = step if is_durable else None, self._began_at
        self._newest = None
        if step is not None:
            self._ranks.resumed(step)
        for follower in self._followers:
            follower.start(step or 0)

    def begin_at(self, step: int) -> None:
        """Instead of `restore`, for a program that has loaded a checkpoint of `dir` by itself, or started from scratch.

        Cleans up after dead runs, verifies the checkpoint, and retires those that follow it if `rewind` is set.

        Args:
            step: the step of the checkpoint; 0: from scratch

        Raises:
            CheckpointCorruptError: it is damaged; set aside if there is an older one, from which to resume instead
            CheckpointExistsError: checkpoints follow, and saves would collide with them
        """
        self._owner.check()
        if self._checkpointer is None:
            return
        step = checked_step(step)
        self._ranks.check_world()
        self._wait_for_own_saves()
        is_here = self._restorer.begin(step)
        self._begin(step, is_here, is_here)

    def add_listener(self, listener: CheckpointListener) -> None:
        """Call a listener for the saves and restores from now on; see `CheckpointListener`.

        Raises:
            CheckpointTypeError: it is none
        """
        if self._checkpointer is not None:
            self._checkpointer.add_listener(listener)

    def maybe_save(self, step: int, state: Mapping[Any, Any], *, metrics: Mapping[str, Any] | None = None) -> bool:
        """Save if the policy says so. Call this after every step. Returns whether a save was started.

        Args:
            step: the step just done
            state: nested dicts of tensors, plain values, and objects with `state_dict()`. The manager keeps a
                reference to it, for the save at the end.
            metrics: as for `save`; used if this step is saved

        Raises:
            CheckpointWorldError: the process group is not the one that the manager was built with
            CheckpointError: the save failed, or an earlier one did and its error was not raised yet. With several ranks
                it is raised at the next save, on all of them.
        """
        return self._save(ReachedStep(step, state, metrics), only_if_due=True)

    def save(self, step: int, state: Mapping[Any, Any], *, metrics: Mapping[str, Any] | None = None) -> bool:
        """Save now. Returns whether a save was started.

        None is started if the step is saved already, if `overlap: skip` applies, or if it could not begin and
        `on_error` is `warn`; the last two cases are in `reports`.

        Args:
            step: the step just done
            state: as for `maybe_save`
            metrics: numbers by name, such as `{"val_loss": 0.5}`, which the checkpoint keeps for `keep.best`. Of
                several ranks, what rank 0 passes counts.

        Raises:
            CheckpointBusyError: `overlap: error`, and an earlier save is still running
            CheckpointExistsError: an older run saved this step, or later ones
            CheckpointStepError: the step is not a valid step, or before the one that this run restored from `dir` or
                saved last; whatever `on_error` says
            CheckpointTypeError: the metrics are not numbers by name
            CheckpointError: this save or an earlier one failed
        """
        if self._is_saved(step):
            logger.warning("step %d is saved already, and this call of save() does nothing: a step is saved once", step)
        return self._save(ReachedStep(step, state, metrics), only_if_due=False)

    def _is_saved(self, step: int) -> bool:
        """Whether this run has saved the step last, or is doing so, or began with it."""
        newest = self._newest
        failed = newest is not None and newest.done() and newest.report.outcome != "committed"
        return self._saved_step is not None and step == self._saved_step and not failed

    def _save(self, reached: ReachedStep, *, only_if_due: bool) -> bool:
        """The loop has reached a step: note it, and save it unless there is a reason not to."""
        self._owner.check()
        step = checked_step(reached.number)
        if self._checkpointer is None:
            return False
        self._last = reached._replace(number=step)
        self._ranks.at_step(step)
        self._run.events.step_ended(step)
        self._delete_old(step)
        place = self._run
        if only_if_due and not self._is_due(step, reached.state):
            if place.snapshots is None or not self._policy.should_keep(step) or step == self._kept_step:
                return False
            place = place.snapshots
        elif self._is_saved(step):
            return False
        path, before = place.path_of(step), self._clock.last_save
        may_wait = self._policy.overlap == "wait" or (self._policy.overlap == "error" and place is not self._run)
        try:
            newest = self._saved_step if self._kept_step is None else self._kept_step
            refuse_earlier(step, newest, "restored" if self._newest is None else "saved last")
            if place is self._run:
                self._clock.last_save = self._ranks.outside.now()
            _, save = self._pipeline.save(reached.state, path, may_wait=may_wait, step=step, metrics=reached.metrics)
        except CheckpointBusyError as error:
            self._clock.last_save = before
            if self._policy.overlap == "error":
                raise CheckpointBusyError(
                    f"Step {step} is not saved, because an earlier save is still running; use checkpoint.overlap=wait "
                    "or skip, or save less often."
                ) from error
            return self._skip(step, "an earlier save is still running (checkpoint.overlap=skip)")
        except CheckpointError as error:
            self._refusal = step, str(error)
            raise
        self._kept_step = step
        if self._skips.row:
            self._skips.over()
        if place is self._run:
            self._saved_step, self._newest = step, save
        return save.begun and (self._pipeline.caller.in_other_process or save.report.outcome == "committed")

    def _is_due(self, step: int, state: Mapping[Any, Any]) -> bool:
        """Whether the policy says to save the step; if not, the state helps to prepare the first save."""
        if self._ranks.world_size == 1:
            self._saves.raise_first()
        self._ranks.check_world()
        try:
            due = self._clock.is_due(step)
        except CheckpointTimeoutError as error:
            if self._timeouts.max_stall is None or not self._pipeline.policy.warn:
                raise
            return self._skip(step, f"{error} (checkpoint.max_stall_s)")
        if not due and self._policy.repeats:
            self._pipeline.prewarmer.look(state)
        return due

    def _delete_old(self, step: int) -> None:
        """After the first step, on the save thread, delete what dead runs have left and `keep` no longer keeps.

        Not in `restore`: a script that evaluates restores too, and may have other values of `keep`.
        """
        if self._began_at is None or step <= self._began_at:  # such a step is refused, or there already
            return
        began_at, self._began_at = self._began_at, None
        if self._policy.enabled and self._ranks.is_leader:
            self._pipeline.queue.run_after_saves(partial(self._restorer.delete_old, began_at))

    def _prewarm_loaded(self, state: Mapping[Any, Any]) -> None:
        """Prewarm after a restore, but not from scratch: the optimizer's first step changes the plan."""
        try:
            self._pipeline.prewarm(state, wait=False)
        except CheckpointError as error:
            if not self._pipeline.policy.warn:
                raise
            logger.warning("the first save will fail (checkpoint.on_error=warn): %s", error)

    def _skip(self, step: int, text: str) -> bool:
        self._skips.warn("step %d is skipped: %s", step, text)
        report = SaveReport(
            path=self._run.path_of(step), outcome="skipped", step=step, error=text, time=self._ranks.outside.date()
        )
        self._pipeline.add_report(report)
        return False

    def prewarm(self, state: Mapping[Any, Any]) -> None:
        """Plan and allocate memory for this state, so that the first save is as fast as others."""
        self._owner.check()
        if self._checkpointer is not None:
            self._checkpointer.prewarm(state)

    def wait(self) -> None:
        """Wait until every save that was started is committed, or raise the error of one that failed.

        Raises:
            CheckpointTimeoutError: a save hung; see timeouts.write
        """
        self._owner.check(may_be_closed=True)
        if self._checkpointer is not None:
            self._pipeline.wait()

    def close(self) -> None:
        """Finish the saves in flight and free all resources; starts no save. Bounded; safe to call twice.

        Raises:
            CheckpointError: an earlier save failed, and its error was not raised yet
        """
        if self._owner.closed or not self._owner.is_here:
            return
        self._owner.closed = True
        if self._policy.enabled and (self._last is None or self._last.number == self._restored):
            self.idle = self._restored  # an evaluation has no steps
            warn_of_idle(self._run, self.idle)
        self._last = self._began_at = None  # the first refers to the state
        try:
            if self._checkpointer is not None:
                self._ranks.outside.not_at_exit(self._at_exit)
                self._checkpointer.close()
                self._skips.end()
                log_saves(self._run, self.reports)
        except BaseException:
            self._failed = True
            raise
        finally:
            try:
                finish = not self._failed and self.stopped_by is None
                for follower in self._followers:
                    follower.end(finish=finish)
            finally:
                self.stop_catching()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._owner.is_here:
            return
        if error is not None:
            self._failed = True
            if not (isinstance(error, SystemExit) and not error.code):
                self._outlive()
            self._restored = None  # the loop may have failed before its first step
            if isinstance(error, KeyboardInterrupt):
                warn_of_wait(self._saves)
            try:
                self.close()
            except CheckpointError as failure:
                # The exception of the loop propagates; this one must not hide it.
                logger.error("while closing the checkpoint manager: %s", failure)
            return
        try:
            if (self._policy.at_end or self.stopped_by is not None) and self._last is not None:
                self._save_last(self._last)
        finally:
            self.close()

    def _outlive(self) -> None:
        """The run has failed: what its writer process keeps is for the next one."""
        if self._checkpointer is not None and isinstance(self._pipeline.caller, PersistentCaller):
            self._pipeline.caller.outlive()

    def _save_last(self, last: ReachedStep) -> None:
        """Save the last step, even if `overlap` is `skip` or an earlier save has failed."""
        if self.stopped_by is not None and self._ranks.is_leader:
            steps = self._run.scan().committed
            newest = f"that of step {steps[-1]}" if steps else "none"
            logger.info(LAST_SAVE, self.stopped_by.name, last.number, newest)
        self._saves.wait(self._timeouts.whole_save)
        failed = self._saves.deliver_failed()
        if any(
            report.step == last.number and report.outcome == "failed" and not report.memory for report in self.reports
        ):
            logger.warning("trying once more to save step %d, because it is the last one", last.number)
        refusal = self._refusal
        try:
            self._save(last, only_if_due=False)
        except CheckpointError as error:
            # Stopped while it repeats steps: the exit code must not change, because a later checkpoint is there.
            repeats = isinstance(error, CheckpointStepError) and self.stopped_by is not None
            if not repeats and refusal != (last.number, str(error)):
                raise
            logger.warning("the last step is not saved: %s", error)
        finally:
            if failed:
                failed[0].result(0)  # the errors of the others are in the log and in the reports


def _warn_if_open(manager: weakref.ref[CheckpointManager]) -> None:
    alive = manager()
    if alive is not None and alive._owner.is_here and hasattr(sys, "last_value"):  # an exception ends the script
        alive._outlive()
    if alive is not None and alive._owner.is_here and alive._last is not None and alive._policy.at_end:
        warn_of_open(alive._run, None if alive._is_saved(alive._last.number) else alive._last.number)
