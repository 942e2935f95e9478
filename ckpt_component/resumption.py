"""Where a run begins: rank 0 looks what is committed, all ranks load the same step, and fall back together."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from .checkpointer import Checkpointer
from .coordination import Coordinator, Meetings
from .errors import CheckpointCorruptError, CheckpointError, CheckpointLoadError, CheckpointUnreadableError
from .policies import ResumePolicy
from .reports import Timeouts
from .storage.debris import living_attempts, sweep
from .storage.fs import FsOps
from .storage.names import StepNames
from .storage.quarantine import quarantine
from .storage.scan import Scan, read_pointer, scan_steps, write_pointer
from .storage.visibility import wait_visible

logger = logging.getLogger(__name__)

#: The worst first: what an older checkpoint may make up for, and before that what proves damage.
_ORDER: tuple[type[CheckpointError], ...] = (CheckpointCorruptError, CheckpointUnreadableError, CheckpointLoadError)


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

    def load(self, state: dict[str, Any], strict: bool, allow_dtype_cast: bool, meetings: Meetings) -> int | None:
        """Load the best step that is whole; see `CheckpointManager.restore`. Returns it, or None.

        What was found to be damaged is quarantined once an older checkpoint has been loaded in its place, or where
        there never was a checkpoint: until then it may be all there is.

        Args:
            state: filled in place.
            strict: refuse a checkpoint that lacks keys of the state.
            allow_dtype_cast: let the state's tensors take values of another dtype.
            meetings: where all ranks meet that restore.
        """
        deadline = time.monotonic() + self._timeouts.stage + self._timeouts.close
        more = {"allow_dtype_cast": True} if allow_dtype_cast else {}  # a reader of one's own may not know it
        candidates, committed, suspects = meetings.ask(None, lambda _: self._look(), deadline)
        tag = meetings.tag
        for number, step in enumerate(candidates):
            try:
                self._load_together(step, state, f"{tag}/{number}", strict=strict, **more)
            except CheckpointCorruptError as error:
                if number + 1 == len(candidates):
                    raise
                logger.error("step %d cannot be used, trying step %d: %s", step, candidates[number + 1], error)
                # What cannot be read may be all right: the disk or the mount is not.
                if not isinstance(error, CheckpointUnreadableError):
                    suspects.append(step)
                continue
            moved = self._tidy_together(suspects, committed, tag)
            later = [other for other in committed if other > step and other not in moved]
            if later and self._ranks.leads:
                logger.warning(
                    "resumed from step %d although %s follow(s); saving those steps again will be refused", step, later
                )
            return int(step)
        self._tidy_together(suspects, committed, tag)
        return None

    def _look(self) -> list[list[int]]:
        """On the leading rank: the steps to try, best first; all that are committed; and those to quarantine."""
        self._clean_up()
        scan = scan_steps(self._fs, self._root, self._names)
        bad = {**scan.damaged, **scan.torn, **scan.unusable}
        for step, why in sorted(bad.items()):
            logger.error("step %d is no checkpoint that can be used: %s", step, why)
        for why in scan.unfinished.values():
            logger.warning("%s; it is no checkpoint, and left alone", why)
        for why in scan.foreign.values():
            logger.warning("%s, so it is not taken for a checkpoint of this run and left alone", why)
        committed = scan.committed
        if isinstance(self._policy.choice, int) and self._policy.choice in bad:
            raise _kind_of(self._policy.choice, scan)(
                f"checkpoint.resume={self._policy.choice}, and that checkpoint cannot be used: "
                f"{bad[self._policy.choice]}"
            )
        # A folder that has a manifest was a checkpoint once. To begin from scratch beside it is nobody's wish.
        lost = {**scan.damaged, **scan.unusable}
        if self._policy.choice in ("auto", "must") and lost and not committed:
            newest = max(lost)
            raise _kind_of(newest, scan)(
                f"{self._root} holds checkpoints, and none that can be used; the newest: {lost[newest]} To start from "
                "scratch, use checkpoint.resume=never with another checkpoint.dir, or move them away."
            )
        candidates = self._policy.candidates(committed, self._root)
        if not candidates and committed:
            logger.warning(
                "checkpoint.resume=never, and %s holds checkpoints up to step %d; saving one of those steps again "
                "will be refused",
                self._root,
                committed[-1],
            )
        searched = self._policy.choice in ("auto", "must")
        return [candidates, committed, sorted({**scan.damaged, **scan.torn}) if searched else []]

    def _tidy_together(self, suspects: list[int], committed: list[int], tag: str) -> list[int]:
        """Quarantine what is damaged and set the pointer right, on the leading rank. Returns the steps it moved."""
        if self._policy.choice == "never":
            return []
        deadline = time.monotonic() + self._timeouts.stage
        return list(self._ranks.lead(f"{tag}/tidy", lambda: self._tidy(suspects, committed), deadline))

    def _tidy(self, suspects: list[int], committed: list[int]) -> list[int]:
        moved = []
        for step in sorted(set(suspects)):
            path = os.path.join(self._root, self._names.folder(step))
            try:
                target = quarantine(self._fs, path)
            except OSError as error:
                logger.error("%s is damaged and could not be put out of the way: %s", path, error)
                continue
            logger.error("%s is damaged; it is kept as %s, which nothing uses or deletes", path, target)
            moved.append(step)
        left = [step for step in committed if step not in moved]
        if left and read_pointer(self._fs, self._root, self._names) != left[-1]:
            try:
                write_pointer(self._fs, self._root, self._names, left[-1])
            except OSError as error:
                logger.warning("%s in %s could not be set right: %s", self._names.pointer, self._root, error)
            else:
                logger.warning("%s in %s did not name step %d, and does now", self._names.pointer, self._root, left[-1])
        return moved

    def _load_together(self, step: int, state: dict[str, Any], tag: str, **options: bool) -> None:
        """Load a step on all ranks; what fails on one fails on all, and corrupt bytes are worse than anything else.

        `options` are those of `Checkpointer.load`.
        """
        failure: Exception | None = None
        try:
            path = os.path.join(self._root, self._names.folder(step))
            if not self._ranks.leads:
                wait_visible(lambda: self._fs.is_folder(path), path, self._timeouts.visible)
            self._checkpointer.load_to_resume(path, state, **options)
        except Exception as error:
            failure = error
        if self._ranks.world_size == 1:
            if failure is not None:
                raise failure
            return
        said = None if failure is None else [_ORDER.index(_named(failure)), str(failure)]
        # As long as the slowest rank needs to read its part.
        deadline = time.monotonic() + self._timeouts.stage + self._timeouts.write
        told = self._ranks.pool(tag, said, _first_failure, deadline)
        if told is not None:
            raise _ORDER[told[0]](told[1]) from failure

    def _clean_up(self) -> None:
        """Wait, bounded, for what a dead run's writer still finishes; then delete what dead runs left."""
        deadline = time.monotonic() + self._timeouts.close
        said = False
        while living := living_attempts(self._fs, self._root, self._names):
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
        for name in sweep(self._fs, self._root, self._names):
            logger.info("deleted %s, which a dead run left", name)


def _named(failure: Exception) -> type[CheckpointError]:
    """Under which of these the other ranks hear of a failure."""
    for kind in (CheckpointUnreadableError, CheckpointCorruptError):
        if isinstance(failure, kind):
            return kind
    return CheckpointLoadError


def _kind_of(step: int, scan: Scan) -> type[CheckpointError]:
    return CheckpointUnreadableError if step in scan.unusable else CheckpointCorruptError


def _first_failure(said: list[Any]) -> Any:
    """The failure that all ranks are to hear of, and which rank's it is."""
    failures = [(order, rank, text) for rank, (order, text) in ((r, each) for r, each in enumerate(said) if each)]
    if not failures:
        return None
    order, rank, text = min(failures)
    return [order, f"Rank {rank}: {text}"]
