"""Going back: what follows the checkpoint that a run begins with is refused before the first step, or retired.

Otherwise the run would train up to the first step that is saved already, and `keep` would take its new checkpoints for
the oldest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from ..errors import CheckpointExistsError, CheckpointSaveError
from ..spelling import typed
from ..storage.cleanup import quarantine
from ..storage.commit import refuse_existing
from ..storage.fencing import FencingToken, Owner
from ..storage.scan import read_pointer
from .policies import ResumePolicy
from .run_context import RunContext, steps_text

logger = logging.getLogger(__name__)

#: By these torchrun and Slurm count how often they started a job again.
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_RESTORE_ONLY = "A script that only restores sets checkpoint.save.every_steps=null checkpoint.save.at_end=false."


class Rollback:
    """Decides on rank 0, for one run's folder of checkpoints.

    Args:
        run: whose folder it is.
        policy: where the run begins, and whether it may retire what follows.
        ownership: of the folder.

    Attributes:
        settled: a restore has dealt with what follows, so that the first save need not.
    """

    def __init__(self, run: RunContext, policy: ResumePolicy, ownership: FencingToken) -> None:
        self._run = run
        self._root = run.root
        self._policy = policy
        self._ownership = ownership
        self.settled = False

    def refuse(self, later: Iterable[int], step: int | None) -> None:
        """Refuse to begin with a step that others follow.

        Args:
            later: the steps that follow; none: nothing is wrong.
            step: that the run begins with; None: from scratch.

        Raises:
            CheckpointExistsError: with the ways out.
        """
        later = sorted(later)
        if not later:
            return
        steps = f"{'step' if len(later) == 1 else 'steps'} {steps_text(later)}"
        retire = "to retire them (they are renamed, not deleted), checkpoint.rewind=true"
        if step is None:
            text = (
                f"checkpoint.resume=never, and {self._root} holds checkpoints of {steps}. To go on from the newest, "
                f"type checkpoint.resume=auto; to keep them, a new checkpoint.dir; {retire}."
            )
        else:
            path = self._policy.path or self._run.path_of(step)
            text = (
                f"checkpoint.resume={self._policy.choice}, and in {self._root} {steps} would follow step {step}. To "
                f"keep them, type {typed('checkpoint.resume', path)} checkpoint.dir=<new folder>; {retire}; to go on "
                f"from the newest, checkpoint.resume=auto. {_RESTORE_ONLY}"
            )
        raise CheckpointExistsError(self._beside_others(text))

    def retire(self, steps: Iterable[int]) -> list[int]:
        """Rename checkpoints to names that nothing lists, the newest first; this run owns the root then.

        Returns:
            The steps, ascending.

        Raises:
            CheckpointExistsError: the job was restarted, so they may be what it saved itself.
            CheckpointSaveError: the run that saved there still runs, or one could not be renamed.
        """
        steps = sorted(steps)
        if not steps:
            return []
        restart = next((f"{name}={os.environ[name]}" for name in _RESTARTS if os.environ.get(name, "0") != "0"), None)
        if restart is not None:
            raise CheckpointExistsError(
                f"checkpoint.rewind=true retires nothing in a job that was restarted ({restart}), because "
                f"{steps_text(steps)} in {self._root} may be its own. To go on from the newest, type "
                "checkpoint.resume=auto checkpoint.rewind=false; to go back once more, start a new job."
            )
        other = self._ownership.neighbor()
        if other is not None and other.alive:
            raise CheckpointSaveError(
                f"checkpoint.rewind=true would retire {steps_text(steps)} in {self._root}, and {self._runs(other)}. "
                "End it first, or use another checkpoint.dir."
            )
        pointer = os.path.join(self._root, self._run.names.pointer)
        try:
            self._ownership.acquire()
            if read_pointer(self._run.fs, self._root, self._run.names) in steps:
                self._run.fs.unlink(pointer)  # what is left is pointed to afterwards
            for step in reversed(steps):
                target = quarantine(self._run.fs, self._run.path_of(step))
                logger.info("retired step %d (checkpoint.rewind=true): kept as %s", step, target)
        except OSError as error:
            raise CheckpointSaveError(
                f"checkpoint.rewind=true could not retire {steps_text(steps)} in {self._root}: {error}.",
                error.errno,
            ) from error
        return steps

    def admit(self, path: str) -> None:
        """Before a save, on rank 0: nothing that follows may be in its way, where no restore has looked for that.

        Raises:
            CheckpointExistsError: something is; the text names the run that put it there, if that may be alive.
            CheckpointSaveError: it cannot be looked at, or could not be retired.
        """
        if not self.settled:
            self._settle(path)
            self.settled = True
        try:
            refuse_existing(path, by_rename=self._run.fs.atomic_rename)
        except CheckpointExistsError as error:
            raise CheckpointExistsError(self._beside_others(str(error))) from error

    def _settle(self, path: str) -> None:
        folder, name = os.path.split(path)
        step = self._run.names.step(name)
        if step is None or folder != self._root:
            return
        try:
            occupied = self._run.scan().occupied
        except OSError as error:
            raise CheckpointSaveError(f"{self._root} cannot be listed: {error}.", error.errno) from error
        never = self._policy.choice == "never"
        later = [other for other in occupied if never or other >= step]
        if self._policy.rewind:
            self.retire(later)
        elif never:
            self.refuse(later, None)
        elif any(other > step for other in later):
            raise CheckpointExistsError(
                self._beside_others(
                    f"Step {step} is the first that this run saves, and {self._root} holds checkpoints of steps "
                    f"{steps_text(sorted(later))}. To go on from the newest, call restore() before training, with "
                    "checkpoint.resume=auto; to keep them, type a new checkpoint.dir; to retire them (they are "
                    "renamed, not deleted), checkpoint.rewind=true."
                )
            )

    def _beside_others(self, text: str) -> str:
        other = self._ownership.neighbor()
        if other is None:
            return text
        return (
            f"Another run saves to {self._root}: {self._runs(other)}. End one of the two, or give each a "
            f"checkpoint.dir of its own. {text}"
        )

    @staticmethod
    def _runs(other: Owner) -> str:
        return f"{other} {'still runs' if other.alive else 'may still run'}"
