"""The checkpoint folder of a run: write access, the latest-pointer, retention, and the steps that follow.

If steps follow the checkpoint that a run begins with, the run is refused before its first step, or they are retired.
Otherwise the run would fail at the first step that is saved already, and `keep` would treat its new checkpoints as the
oldest.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ..core.commit.cleanup import discard, quarantine
from ..core.commit.commit import refuse_existing
from ..core.commit.fencing import FencingToken, Owner
from ..core.commit.names import TRIAL_PREFIX
from ..core.commit.retention import RetentionPolicy
from ..core.commit.scan import Scan, read_pointer, write_pointer
from ..core.commit.visibility import wait_visible
from ..core.spelling import typed
from ..core.storage.locate import absolute
from ..core.storage.new_names import new_token
from ..core.storage.space import FULL
from ..errors import (
    CheckpointConfigError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointInUseError,
    CheckpointSaveError,
)
from ..events import SaveReport
from ..saving.context import notify
from .policies import ResumePolicy
from .run_context import RunContext, steps_text

logger = logging.getLogger(__name__)

#: torchrun and Slurm count restarts of a job in these.
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_RESTORE_ONLY = "A script that only restores sets checkpoint.save.every_steps=null checkpoint.save.at_end=false."


class RunFolder:
    """The hooks of a run for its saves (`RunHooks`), and how a restore handles the steps that follow.

    Args:
        run: the run.
        resume: where the run begins, and whether it may retire the steps that follow.
        keep: which checkpoints to keep.
        files: small files that rank 0 adds to every checkpoint, by name.
        in_use: each returns the paths of checkpoints that must not be deleted now.
        before_save: called before each save; an exception stops the save.
        on_commit: called for each new checkpoint, on the save thread; must not wait.
        takeover: whether a run that is still running may lose the folder to this one.

    Attributes:
        ownership: fencing token of the folder; the first save acquires it.
        settled: whether a restore has handled the steps that follow, so that the first save need not.
        manifest_fields: where every checkpoint comes from: `run`, the token of the run, and `resumed_from`, the
            checkpoint that it began with, by its name if it is in this folder; None: from scratch.
    """

    def __init__(
        self,
        run: RunContext,
        resume: ResumePolicy,
        keep: RetentionPolicy,
        files: Mapping[str, bytes] | None = None,
        in_use: Sequence[Callable[[], Collection[str]]] = (),
        before_save: Sequence[Callable[[], None]] = (),
        on_commit: Sequence[Callable[[SaveReport], None]] = (),
        *,
        takeover: bool = False,
    ) -> None:
        self.run = run
        self.files = files or {}
        self.resume = resume
        self.ownership = FencingToken(run.fs, run.root, run.names, run.events.run)
        self.settled = False
        self.manifest_fields: Mapping[str, Any] = {"run": run.events.run, "resumed_from": None}
        self._keep = keep
        self._in_use = in_use
        self._before_save = before_save
        self._on_commit = on_commit
        self._takeover = takeover
        self._root = run.root
        #: The folder with its key, for a text.
        self._named = f"checkpoint.{'dir' if run.remote is None else 'local.dir'}={run.root}"
        #: Of the permanent folder behind a local one.
        self.remote = None if run.remote is None else RunFolder(run.remote, resume, keep)

    def check_writable(self) -> None:
        """Make the folder if necessary, and write and delete a small file in it on every rank.

        All ranks call this, before the first step.

        Raises:
            CheckpointConfigError: a rank cannot write there; the same on all ranks.
            CheckpointInUseError: another run that saves there is running on this host; on all ranks.
            CheckpointTimeoutError: a rank did not take part.
        """
        run, failure = self.run, None
        deadline = time.monotonic() + run.timeouts.stage + run.timeouts.visible
        # Rank 0 makes the folder, and the others wait for it.
        run.ranks.run_on_leader("root/made", self._try_to_write, deadline)
        self.ownership.root_exists = run.ranks.is_leader and run.fs.is_folder(run.root)
        if run.remote is not None and run.ranks.world_size > 1:
            self._check_shared(deadline)
        if not run.ranks.is_leader:
            try:
                wait_visible(lambda: run.fs.is_folder(run.root), self._named, run.timeouts.visible)
                self._try_to_write()
            except CheckpointError as error:
                failure = str(error)
        run.ranks.decide("root/tried", failure, _refuse_failed, deadline)
        run.ranks.run_on_leader("root/owner", self._refuse_running, deadline)

    def _refuse_running(self) -> None:
        """Refuse a folder in which another run of this host saves; not if that is unknown, or wanted."""
        try:
            other = self.ownership.other()
        except OSError as error:
            logger.warning("the owner of %s could not be read: %s", self._root, error)
            return
        if other is None or not other.alive:
            return
        if other.is_of_this_process:
            logger.warning(
                "%s: another manager of this process saves there; close() the one you no longer need, because the one "
                "whose first save comes last owns the folder",
                self._named,
            )
        elif self._takeover:
            logger.warning(
                "%s: another run saves there, %s, which is still running; it can no longer commit there once this run "
                "has saved (checkpoint.takeover=true)",
                self._named,
                other,
            )
        else:
            raise CheckpointInUseError(
                f"{self._named}: another run saves there, {other}, which is still running. End it, or use another "
                "checkpoint.dir; with checkpoint.takeover=true this run takes the folder, and the next save of the "
                f"other fails. {_RESTORE_ONLY}"
            )

    def _check_shared(self, deadline: float) -> None:
        """Check that the local folder is the same on all ranks, whose files a checkpoint collects."""
        run, failure = self.run, None
        # Each rank looks in its own folder, which may have another name.
        trial = os.path.join(run.root, run.ranks.run_on_leader("root/trial", self._leave_trial, deadline))
        if not run.ranks.is_leader:
            try:
                wait_visible(lambda: run.fs.exists(trial), trial, run.timeouts.visible)
            except CheckpointError:
                failure = (
                    f"{self._named} is another folder than that of rank 0. All ranks must share it: the disk of a host "
                    "is for the ranks of one host, a parallel file system for those of several."
                )
        try:
            run.ranks.decide("root/shared", failure, _refuse_failed, deadline)
        finally:
            if run.ranks.is_leader:
                run.fs.unlink(trial)

    def _leave_trial(self) -> str:
        name = f"{TRIAL_PREFIX}{new_token()}"
        self.run.fs.write_new(os.path.join(self._root, name), b"")
        return name

    def _try_to_write(self) -> None:
        fs, root = self.run.fs, self.run.root
        try:
            fs.make_folders(root)
            fs.try_folder(root, f"{TRIAL_PREFIX}{new_token()}")
        except OSError as error:
            if error.errno in FULL:
                # A dead run's files may fill the disk; they are deleted when this run restores.
                logger.warning("%s is full (%s); saves fail until there is free space", root, error)
                return
            raise CheckpointConfigError(
                f"{self._named} cannot be written to: {error}. Name another folder; a script that only "
                "restores sets checkpoint.save.every_steps=null checkpoint.save.at_end=false."
            ) from error

    def check_path(self, path: str) -> None:
        """Before a save: refuse or retire the steps that follow, unless a restore did, and check that the path is free.

        Raises:
            CheckpointExistsError: a checkpoint is in the way; the text names the run that saved it, if it may be alive.
            CheckpointSaveError: the folder cannot be listed, a step could not be retired, or `before_save` raised it.
        """
        for check in self._before_save:
            check()
        if not self.settled:
            self._settle(self._step_of(path))
            self.settled = True
        try:
            refuse_existing(self.run.fs, path)
        except CheckpointExistsError as error:
            raise CheckpointExistsError(self._beside_others(str(error))) from error

    def close(self) -> None:
        """The run has ended, so that another one may save in the folder at once."""
        self.ownership.release()

    def resumed_from(self, path: str) -> None:
        """Record the checkpoint that the run begins with."""
        folder, name = os.path.split(absolute(path))
        source = name if folder == self._root else os.path.join(folder, name)
        self.manifest_fields = {**self.manifest_fields, "resumed_from": source}

    def after_commit(self, report: SaveReport) -> None:
        """Call `on_commit`, and set the pointer to a new checkpoint. A failure is only logged."""
        for called in self._on_commit:
            notify(called, report)
        step = self._step_of(report.path)
        try:
            write_pointer(self.run.fs, self._root, self.run.names, step)
        except OSError as error:
            logger.warning("step %d is committed, but its pointer file could not be written: %s", step, error)

    def after_save(self, report: SaveReport) -> None:
        """Delete what `keep` no longer keeps after a new checkpoint, never that one. A failure is a warning."""
        step = self._step_of(report.path)
        try:
            scan = self.run.scan(warns=True)
            self._warn_if_never_best(step, scan)
            self._delete_old(scan, step)
        except OSError as error:
            logger.warning("step %d is committed, but listing or deleting older checkpoints failed: %s", step, error)

    def after_restore(self, step: int) -> None:
        """Delete what dead runs have left and `keep` no longer keeps, never the restored step.

        A failure is only logged. While another run may be alive there, this is left to the first save of this run,
        which takes the folder over.
        """
        try:
            if self.ownership.neighbor() is None:
                self._delete_old(self.run.scan(), step)
        except Exception:  # as after a save: training does not depend on it
            logger.exception("listing or deleting older checkpoints than step %d failed", step)

    def _delete_old(self, scan: Scan, newest: int) -> None:
        run = self.run
        best = [] if run.best is None else run.best_of(scan)[: run.best.last]
        # After a later save, what is in use now is deleted too.
        in_use = {self._step_of(path) for paths in self._in_use for path in paths()}
        for old in self._keep.to_delete(scan.committed, [*best, *in_use, newest]):
            logger.info("deleting the checkpoint of step %d (checkpoint.keep)", old)
            discard(run.fs, run.path_of(old))
            run.note("delete", old, run.path_of(old))

    def _warn_if_never_best(self, step: int, scan: Scan) -> None:
        """Warn, once for each reason, that the new checkpoint cannot be the best one."""
        why = None if self.run.best is None else self.run.best.why_never(scan.metrics.get(step, {}))
        if why is not None and why not in self.run.warned:
            self.run.warned.add(why)
            logger.warning("step %d is never the best checkpoint (checkpoint.keep.best): %s", step, why)

    def refuse(self, later: Iterable[int], step: int | None) -> None:
        """Refuse to begin with a step if others follow it.

        Args:
            later: the steps that follow; if empty, nothing is raised.
            step: the step that the run begins with; None: from scratch.

        Raises:
            CheckpointExistsError: steps follow; the text says what to do.
        """
        later = sorted(later)
        if not later:
            return
        steps = f"{'step' if len(later) == 1 else 'steps'} {steps_text(later)}"
        retire = "to retire them (they are renamed, not deleted), checkpoint.rewind=true"
        if step is None:
            text = (
                f"checkpoint.resume=never, and {self.run.roots} holds checkpoints of {steps}. To continue from the "
                f"newest, type checkpoint.resume=auto; to keep them, a new checkpoint.dir; {retire}."
            )
        else:
            path = self.resume.path or self.run.path_of(step)
            text = (
                f"checkpoint.resume={self.resume.choice}, and in {self.run.roots} {steps} would follow step {step}. To "
                f"keep them, type {typed('checkpoint.resume', path)} checkpoint.dir=<new folder>; {retire}; to "
                f"continue from the newest, checkpoint.resume=auto. {_RESTORE_ONLY}"
            )
        raise CheckpointExistsError(self._beside_others(text))

    def refuse_later(self, later: Iterable[int], step: int) -> None:
        """Refuse to continue after a step that the program has loaded by itself, if others follow it.

        Args:
            later: the steps that follow; if empty, nothing is raised.
            step: the step; 0: from scratch.

        Raises:
            CheckpointExistsError: steps follow; the text says what to do.
        """
        later = sorted(later)
        if later:
            begins = f"continues after step {step}" if step else "starts from scratch"
            raise CheckpointExistsError(
                self._beside_others(
                    f"This run {begins}, and {self.run.roots} holds checkpoints of steps {steps_text(later)}. Resume "
                    "from the newest, or save to another folder; checkpoint.rewind=true retires them (they are "
                    "renamed, not deleted)."
                )
            )

    def retire(self, steps: Iterable[int]) -> list[int]:
        """Rename checkpoints to names that no scan lists, the newest first, after acquiring ownership of the root.

        Returns:
            The steps, ascending.

        Raises:
            CheckpointExistsError: the job was restarted, so it may have saved them itself.
            CheckpointSaveError: the run that saved there is still running, or a checkpoint could not be renamed.
        """
        folders = (self,) if self.remote is None else (self.remote, self)
        return sorted({step for folder in folders for step in folder._retire(sorted(steps))})

    def _retire(self, steps: list[int]) -> list[int]:
        """Retire those of the steps that this folder has."""
        steps = [step for step in steps if self.run.fs.exists(self.run.path_of(step))]
        if not steps:
            return []
        restart = next((f"{name}={os.environ[name]}" for name in _RESTARTS if os.environ.get(name, "0") != "0"), None)
        if restart is not None:
            raise CheckpointExistsError(
                f"checkpoint.rewind=true retires nothing in a job that was restarted ({restart}), because "
                f"{steps_text(steps)} in {self._root} may be its own. To continue from the newest, type "
                "checkpoint.resume=auto checkpoint.rewind=false; to go back once more, start a new job."
            )
        other = self.ownership.neighbor()
        if other is not None and other.alive and not self._takeover:
            raise CheckpointSaveError(
                f"checkpoint.rewind=true would retire {steps_text(steps)} in {self._root}, and {self._runs(other)}. "
                "End it first, or use another checkpoint.dir."
            )
        if other is not None:
            logger.warning("%s: %s, and can no longer commit there", self._root, self._runs(other))
        pointer = os.path.join(self._root, self.run.names.pointer)
        try:
            self.ownership.acquire()
            if read_pointer(self.run.fs, self._root, self.run.names) in steps:
                self.run.fs.unlink(pointer)  # the pointer is repaired afterwards
            for step in reversed(steps):
                target = quarantine(self.run.fs, self.run.path_of(step))
                logger.info("retired step %d (checkpoint.rewind=true): kept as %s", step, target)
                self.run.note("retire", step, target)
        except OSError as error:
            raise CheckpointSaveError(
                f"checkpoint.rewind=true could not retire {steps_text(steps)} in {self._root}: {error}.",
                error.errno,
            ) from error
        return steps

    def _settle(self, step: int) -> None:
        """Handle the steps that follow the first saved step, without a restore, as `rewind` says."""
        try:
            occupied = self.run.scan_all().occupied
        except OSError as error:
            raise CheckpointSaveError(f"{self._root} cannot be listed: {error}.", error.errno) from error
        never = self.resume.choice == "never"
        later = [other for other in occupied if never or other >= step]
        if self.resume.rewind:
            self.retire(later)
        elif never:
            self.refuse(later, None)
        elif any(other > step for other in later):
            raise CheckpointExistsError(
                self._beside_others(
                    f"Step {step} is the first that this run saves, and {self.run.roots} holds checkpoints of steps "
                    f"{steps_text(sorted(later))}. To continue from the newest, call restore() before training, with "
                    "checkpoint.resume=auto; to keep them, type a new checkpoint.dir; to retire them (they are "
                    "renamed, not deleted), checkpoint.rewind=true."
                )
            )

    def _step_of(self, path: str) -> int:
        return int(os.path.basename(path).removeprefix(self.run.names.prefix))

    def _beside_others(self, text: str) -> str:
        other = self.ownership.neighbor()
        if other is None:
            return text
        return (
            f"Another run saves to {self._root}: {self._runs(other)}. End one of the two, or give each a "
            f"checkpoint.dir of its own. {text}"
        )

    @staticmethod
    def _runs(other: Owner) -> str:
        return f"{other} {'still runs' if other.alive else 'may still run'}"


def _refuse_failed(failures: list[str | None]) -> None:
    for rank, text in enumerate(failures):
        if text is not None:
            raise CheckpointConfigError(f"On rank {rank}: {text}")
