"""Where a run begins: rank 0 looks what is committed, all ranks load the same step, and fall back together."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from .checkpointer import Checkpointer
from .coordination import Coordinator
from .errors import CheckpointCorruptError, CheckpointLoadError
from .policies import ResumePolicy
from .reports import Timeouts
from .storage.commit import living_attempts, sweep
from .storage.fs import FsOps
from .storage.names import StepNames
from .storage.scan import committed_steps

logger = logging.getLogger(__name__)


class Resumption:
    """One search for the checkpoint to begin with.

    Args:
        checkpointer: loads.
        ranks: how the ranks agree.
        fs: where effects go.
        root: folder of the run's checkpoints.
        names: how steps are named on disk.
        policy: which steps to try.
        timeouts: deadlines.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        ranks: Coordinator,
        fs: FsOps,
        root: str,
        names: StepNames,
        policy: ResumePolicy,
        timeouts: Timeouts,
    ) -> None:
        self._checkpointer = checkpointer
        self._ranks = ranks
        self._fs = fs
        self._root = root
        self._names = names
        self._policy = policy
        self._timeouts = timeouts

    def load(self, state: dict[str, Any], strict: bool, tag: str) -> int | None:
        """Load the best step that is whole; see `CheckpointManager.restore`. Returns it, or None.

        Args:
            state: filled in place.
            strict: refuse a checkpoint that lacks keys of the state.
            tag: of the ranks' questions; used once.
        """
        deadline = time.monotonic() + self._timeouts.stage + self._timeouts.close
        candidates, committed = self._ranks.lead(f"{tag}/look", self._look, deadline)
        for number, step in enumerate(candidates):
            try:
                self._load_together(step, state, strict, f"{tag}/{number}")
            except CheckpointCorruptError as error:
                if number + 1 == len(candidates):
                    raise
                logger.error("step %d cannot be used, trying step %d: %s", step, candidates[number + 1], error)
                continue
            later = [other for other in committed if other > step]
            if later and self._ranks.leads:
                logger.warning(
                    "resumed from step %d although %s follow(s); saving those steps again will be refused", step, later
                )
            return int(step)
        return None

    def _look(self) -> list[list[int]]:
        """On the leading rank: the steps to try, best first, and all that are committed."""
        self._clean_up()
        committed = committed_steps(self._fs, self._root, self._names)
        candidates = self._policy.candidates(committed, self._root)
        if not candidates and committed:
            logger.warning(
                "checkpoint.resume=never, and %s holds checkpoints up to step %d; saving one of those steps again "
                "will be refused",
                self._root,
                committed[-1],
            )
        return [candidates, committed]

    def _load_together(self, step: int, state: dict[str, Any], strict: bool, tag: str) -> None:
        """Load a step on all ranks; what fails on one fails on all, and corrupt bytes are worse than anything else."""
        failure: Exception | None = None
        try:
            path = os.path.join(self._root, self._names.folder(step))
            self._checkpointer.load_to_resume(path, state, strict=strict)
        except Exception as error:
            failure = error
        if self._ranks.world_size == 1:
            if failure is not None:
                raise failure
            return
        said = None if failure is None else [isinstance(failure, CheckpointCorruptError), str(failure)]
        # As long as the slowest rank needs to read its part.
        deadline = time.monotonic() + self._timeouts.stage + self._timeouts.write
        told = self._ranks.pool(tag, said, _first_failure, deadline)
        if told is not None:
            kind = CheckpointCorruptError if told[0] else CheckpointLoadError
            raise kind(told[1]) from failure

    def _clean_up(self) -> None:
        """Wait, bounded, for what a dead run's writer still finishes; then delete what dead runs left."""
        deadline = time.monotonic() + self._timeouts.close
        said = False
        while living := living_attempts(self._fs, self._root):
            if not said:
                logger.info(
                    "waiting up to %g s for a checkpoint that another process finishes: %s",
                    self._timeouts.close,
                    living,
                )
                said = True
            if time.monotonic() > deadline:
                logger.warning("%s is still being written by another process; going on without it", living)
                break
            time.sleep(0.05)
        for name in sweep(self._fs, self._root):
            logger.info("deleted %s, which a dead run left", name)


def _first_failure(said: list[Any]) -> Any:
    """The failure that all ranks are to hear of: corrupt bytes first, which an older checkpoint may make up for."""
    failures = [(rank, *each) for rank, each in enumerate(said) if each is not None]
    if not failures:
        return None
    rank, corrupt, text = next((failure for failure in failures if failure[1]), failures[0])
    return [corrupt, f"Rank {rank}: {text}"]
