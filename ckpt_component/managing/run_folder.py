"""The checkpoint folder of a run: write access, the latest-pointer, retention, and the steps that follow.

If steps follow the checkpoint that a run begins with, the run is refused before its first step, or they are retired.
Otherwise the run would fail at the first step that is saved already, and `keep` would treat its new checkpoints as the
oldest.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..background.jobs import Follower
from ..core.commit.cleanup import RetentionPolicy, discard, quarantine
from ..core.commit.fencing import FencingToken, Owner
from ..core.commit.protocols import protocol_of
from ..core.commit.scan import KnownSteps, Scan, examine, read_pointer, warn_of_skipped, write_pointer
from ..core.lane import Lane
from ..core.spelling import typed
from ..core.storage.locate import absolute, same_folder
from ..errors import (
    CheckpointExistsError,
    CheckpointSaveError,
)
from ..events import SaveReport
from ..saving.save_queue import notify
from .policies import ResumePolicy
from .run_context import RESTORE_ONLY, RunContext, steps_text
from .write_access import WriteAccess

logger = logging.getLogger(__name__)


class Purge:
    """The deletions of a run, one purge at a time. What fails is only logged: the next purge tries it again.

    Args:
        run: the run, whose folder it is
        keep: which checkpoints to keep
        in_use: each returns the paths of checkpoints that must not be deleted now
    """

    def __init__(
        self, run: RunContext, keep: RetentionPolicy, in_use: Sequence[Callable[[], Collection[str]]] = ()
    ) -> None:
        self._run = run
        self._keep = keep
        self._in_use = in_use
        self._known = KnownSteps(run.fs, run.root, run.names)
        self._found: Scan | None = None
        self._damaged: set[int] = set()
        self._outside = run.ranks.outside
        limit = run.timeouts.close
        self._lane = Lane("ckpt-purge", self._outside, at_exit=limit, jobs="older checkpoints to be deleted")

    def found(self, scan: Scan) -> None:
        """Take over what a scan of the folder has found, so that the next purge does not examine it once more."""
        scan.manifests.clear()  # they take memory for each file of a checkpoint
        self._found = scan

    def leave_damaged(self, step: int) -> None:
        """Neither count nor delete the checkpoint of a step: its bytes are damaged, and it could not be quarantined."""
        self._damaged.add(step)

    def after_save(self, step: int) -> None:
        """Start to delete what is not kept beside a new checkpoint, never that one.

        Called on the save thread, so that what is listed has no checkpoint of a later save.
        """
        self._damaged.discard(step)
        self._begin(partial(self._after_save, step), f"step {step} is committed")

    def after_restore(self, step: int) -> None:
        """The same beside the checkpoint that the run began with."""
        self._begin(partial(self._after_restore, step), f"step {step} was restored")

    def wait(self, seconds: float) -> bool:
        """Wait for the purge that is running. Returns whether it has ended."""
        return self._lane.drain(self._outside.now() + seconds)

    def close(self) -> None:
        """Wait for the purge that is running, for as long as its storage takes, and end its thread."""
        self._lane.drain(math.inf)
        self._lane.close(self._outside.now() + self._run.timeouts.close)

    def _begin(self, purge: Callable[[Collection[str]], None], after: str) -> None:
        run, limit = self._run, self._run.timeouts.close
        if not self._lane.drain(self._outside.now() + limit):
            text = "%s, and deleting older checkpoints takes longer than %g s (timeouts.close); more is deleted later"
            logger.warning(text, after, limit)
            return
        found, self._found = self._found, None
        if found is not None:
            self._known = KnownSteps(run.fs, run.root, run.names, found)
        with _logged(after):
            self._lane.post(_run, purge, run.fs.names(run.root), after)

    def _after_save(self, step: int, entries: Collection[str]) -> None:
        new = self._known.update(entries)
        if step not in new:
            self._known.look_again([step])  # its folder was there already, with an attempt that failed
        warn_of_skipped(self._known.scan, self._run.warned)
        self._warn_if_never_best(step)
        self._delete(step, {step, *new})

    def _after_restore(self, step: int, entries: Collection[str]) -> None:
        self._delete(step, self._known.update(entries))

    def _delete(self, newest: int, examined: set[int]) -> None:
        for old in self._unkept(newest, examined):
            path = self._run.path_of(old)
            logger.info("deleting the checkpoint of step %d (checkpoint.keep)", old)
            discard(self._run.fs, path)
            self._run.note("delete", old, path)
        for part in self._outlived_parts():
            logger.info("deleting what is left of the checkpoint of step %d: %s", part, self._known.scan.parts[part])
            discard(self._run.fs, self._run.path_of(part))

    def _outlived_parts(self) -> list[int]:
        """The steps of which there are only parts, as hosts are lost, and that would not be kept if they were whole."""
        kept = self._keep.newest(self._known.scan.committed)
        older = [step for step in self._known.scan.parts if len(kept) == self._keep.last and step < kept[0]]
        self._known.look_again(older)  # the others may be back
        return [step for step in older if step in self._known.scan.parts]

    def _unkept(self, newest: int, examined: set[int]) -> list[int]:
        """The steps to delete, when each checkpoint on which that depends has been examined in this purge.

        They are those to delete, and those that are kept instead: the newest and the best. For if one of these is
        damaged, an older one is kept in its place.
        """
        run, scan = self._run, self._known.scan
        # After a later save, what is in use now is deleted too.
        in_use = {run.step_of(path) for paths in self._in_use for path in paths()}
        while True:
            committed = [step for step in scan.committed if step not in self._damaged]
            best = (
                [] if run.best is None else [step for step in run.best_of(scan) if step in committed][: run.best.last]
            )
            old = self._keep.to_delete(committed, [*best, *in_use, newest])
            kept = {*best, *self._keep.newest(committed)}
            unsure = {*old, *kept} - examined if old else set()
            if not unsure:
                self._known.keep_manifests(kept)
                return old
            self._known.look_again(unsure)
            examined |= unsure

    def _warn_if_never_best(self, step: int) -> None:
        """Warn, once for each reason, that the new checkpoint cannot be the best one."""
        run = self._run
        why = None if run.best is None else run.best.why_never(self._known.scan.metrics.get(step, {}))
        if why is not None and why not in run.warned:
            run.warned.add(why)
            logger.warning("step %d is never the best checkpoint (checkpoint.keep.best): %s", step, why)


def _run(purge: Callable[[Collection[str]], None], entries: Collection[str], after: str) -> None:
    with _logged(after):
        purge(entries)


@contextlib.contextmanager
def _logged(after: str) -> Iterator[None]:
    """Log what fails; `after` says what has succeeded."""
    try:
        yield
    except OSError as error:
        logger.warning("%s, but listing or deleting older checkpoints failed: %s", after, error)
    except Exception:  # training does not depend on it
        logger.exception("%s, but listing or deleting older checkpoints failed", after)


#: torchrun and Slurm count restarts of a job in these.
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


class RunFolder:
    """The hooks of a run for its saves (`RunHooks`), and how a restore handles the steps that follow.

    Args:
        run: the run
        resume: where the run begins, and whether it may retire the steps that follow
        keep: which checkpoints to keep
        files: small files that rank 0 adds to every checkpoint, by name
        followers: what works with the checkpoints of the run
        takeover: whether a run that is still running may lose the folder to this one

    Attributes:
        ownership: fencing token of the folder; the first save acquires it
        purge: deletes what `keep` no longer keeps
        settled: whether a restore has handled the steps that follow, so that the first save need not
        manifest_fields: where every checkpoint comes from: `run`, the token of the run, and `resumed_from`, the
            checkpoint that it began with, by its name if it is in this folder; None: from scratch
    """

    def __init__(
        self,
        run: RunContext,
        resume: ResumePolicy,
        keep: RetentionPolicy,
        files: Mapping[str, bytes] | None = None,
        followers: Sequence[Follower] = (),
        *,
        takeover: bool,
    ) -> None:
        self.run = run
        self.files = files or {}
        self.resume = resume
        self.ownership = FencingToken(run.fs, run.root, run.names, run.events.run)
        self.settled = False
        self.manifest_fields: Mapping[str, Any] = {"run": run.events.run, "resumed_from": None}
        self.purge = Purge(run, keep, [follower.in_use for follower in followers])
        self._followers = followers
        self._takeover = takeover
        self._root = run.root
        self._protocol = protocol_of(run.fs)
        #: Of the permanent folder behind a local one.
        self.remote = None if run.remote is None else RunFolder(run.remote, resume, keep, takeover=takeover)

    def check_writable(self) -> None:
        """Before the first step, on all ranks; see `WriteAccess.check`."""
        WriteAccess(self.run, self.ownership, takeover=self._takeover).check()

    def check_path(self, path: str) -> None:
        """Before a save: refuse or retire the steps that follow, unless a restore did, and check that the path is free.

        Raises:
            CheckpointExistsError: a checkpoint is in the way; the text names the run that saved it, if it may be alive
            CheckpointSaveError: the folder cannot be listed, a step could not be retired, or a follower refuses it
        """
        for follower in self._followers:
            follower.check()
        if not self.settled:
            self._begin_with(self.run.step_of(path))
            self.settled = True
        if self.run.snapshots is not None and path.startswith(f"{self.run.snapshots.root}/"):
            return  # only this run saves there
        try:
            self._protocol.refuse_taken(path)
        except CheckpointExistsError as error:
            if not self._gave_way(path):
                raise CheckpointExistsError(self._beside_others(str(error))) from error

    def _gave_way(self, path: str) -> bool:
        """Delete what is in the way of a save, if it is a part of a checkpoint whose other hosts are lost."""
        fs, step, scan = self.run.fs, self.run.step_of(path), Scan()
        examine(fs, path, step, scan)
        if step not in scan.parts:
            return False
        self.ownership.acquire()
        logger.warning("step %d is saved anew, and replaces what is left of it: %s", step, scan.parts[step])
        return discard(fs, path)

    def close(self) -> None:
        """The run has ended: when all is deleted that is to be, another one may save in the folder at once."""
        self.purge.close()
        self.ownership.release()

    def resumed_from(self, path: str) -> None:
        """Record the checkpoint that the run begins with."""
        folder, name = os.path.split(absolute(path))
        is_own = folder == self._root or same_folder(folder, self._root)
        source = name if is_own else os.path.join(folder, name)
        self.manifest_fields = {**self.manifest_fields, "resumed_from": source}

    def after_commit(self, report: SaveReport) -> None:
        """Tell the followers of a new checkpoint, and set the pointer to it. A failure is only logged."""
        for follower in self._followers:
            notify(follower.on_commit, report)
        step = self.run.step_of(report.path)
        try:
            write_pointer(self.run.fs, self._root, self.run.names, step)
        except OSError as error:
            logger.warning("step %d is committed, but its pointer file could not be written: %s", step, error)

    def after_save(self, report: SaveReport) -> None:
        """Begin to delete what `keep` no longer keeps after a new checkpoint, never that one."""
        self.purge.after_save(self.run.step_of(report.path))

    def make_room(self) -> None:
        """Wait, for `timeouts.close`, for the deletions after the last save."""
        self.purge.wait(self.run.timeouts.close)

    def after_restore(self, step: int) -> None:
        """Begin to delete what dead runs have left and `keep` no longer keeps, never the restored step.

        While another run may be alive there, this is left to the first save of this run, which takes the folder over.
        """
        try:
            if self.ownership.neighbor() is None:
                self.purge.after_restore(step)
        except Exception:  # as after a save: training does not depend on it
            logger.exception("listing or deleting older checkpoints than step %d failed", step)

    # Steps that follow the one that the run begins with

    def refuse_following(self, step: int | None, occupied: Iterable[int]) -> None:
        """Before a restore: refuse to begin with a step that `resume` names if others follow it, and would stay there.

        Args:
            step: the step; None: from scratch
            occupied: all steps that a save would collide with

        Raises:
            CheckpointExistsError: steps follow; the text says what to do
        """
        if self.resume.searches or self.resume.rewind:
            return  # those that follow are damaged, or are retired once the step was loaded
        later = _following(step, occupied)
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
                f"continue from the newest, checkpoint.resume=auto (docs/failures.md#going-back-to-an-earlier-step). "
                f"{RESTORE_ONLY}"
            )
        raise CheckpointExistsError(self._beside_others(text))

    def retire_following(self, step: int | None, occupied: Iterable[int]) -> list[int]:
        """After a restore: retire the steps that follow, if `rewind` says so; returns which. Arguments as before it."""
        return self._retire_all(_following(step, occupied)) if self.resume.rewind else []

    def warn_of_following(self, step: int | None, occupied: Iterable[int]) -> None:
        """After a restore: warn of steps that follow and stay. Arguments as before it."""
        later = _following(step, occupied)
        if step is not None and later:
            logger.warning(
                "resumed from step %d although %s follow(s); saving those steps again will be refused "
                "(checkpoint.rewind=true retires them)",
                step,
                steps_text(later),
            )

    def begin_after(self, step: int, occupied: Iterable[int]) -> None:
        """Continue after a step that the program has loaded by itself: retire the steps that follow, or refuse.

        Args:
            step: the step; 0: from scratch
            occupied: all steps whose names are taken

        Raises:
            CheckpointExistsError: steps follow; the text says what to do
            CheckpointSaveError: they cannot be retired
        """
        later = _following(step, occupied)
        begins = f"continues after step {step}" if step else "starts from scratch"
        self._retire_or_refuse(
            later,
            f"This run {begins}, and {self.run.roots} holds checkpoints of steps {steps_text(later)}. Resume from the "
            "newest, or save to another folder; checkpoint.rewind=true retires them (they are renamed, not deleted).",
        )

    def _begin_with(self, step: int) -> None:
        """Handle the steps that follow the first saved step, without a restore."""
        try:
            occupied = self.run.scan_all().occupied
        except OSError as error:
            raise CheckpointSaveError(f"{self._root} cannot be listed: {error}.", error.errno) from error
        if self.resume.choice == "never":
            self.refuse_following(None, occupied)
            self.retire_following(None, occupied)
            return
        later = _following(step - 1, occupied)
        self._retire_or_refuse(
            later,
            f"Step {step} is the first that this run saves, and {self.run.roots} already holds "
            f"{'step' if len(later) == 1 else 'steps'} {steps_text(later)}. To continue from the newest, call "
            "restore() before training, with checkpoint.resume=auto; to keep what is there, type a new checkpoint.dir; "
            "to retire it (renamed, not deleted), checkpoint.rewind=true.",
        )

    def _retire_or_refuse(self, later: list[int], text: str) -> None:
        """Do what `rewind` says with steps that follow; `text` is that of the refusal."""
        if self.resume.rewind:
            self._retire_all(later)
        elif later:
            raise CheckpointExistsError(self._beside_others(text))

    def _retire_all(self, steps: Iterable[int]) -> list[int]:
        """Rename checkpoints to names that no scan lists, the newest first, after acquiring ownership of the root.

        Returns:
            The steps, ascending.

        Raises:
            CheckpointExistsError: the job was restarted, so it may have saved them itself
            CheckpointSaveError: the run that saved there is still running, or a checkpoint could not be renamed
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


def _following(step: int | None, occupied: Iterable[int]) -> list[int]:
    """The steps after this one; all of them if the run begins from scratch."""
    return sorted(other for other in occupied if step is None or other > step)
