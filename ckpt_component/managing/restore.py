"""Where a run begins: rank 0 scans what is committed, all ranks load the same step, and fall back together."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from ..checkpointer import Checkpointer
from ..errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLoadError,
    CheckpointNotFoundError,
    CheckpointUnreadableError,
)
from ..storage.cleanup import living_attempts, quarantine, sweep
from ..storage.fs import wait_visible
from ..storage.scan import Scan, committed_under_other_names, repair_pointer
from ..storage.space import amount
from .lookup import refuse_absent_step, refuse_others, size_of_checkpoint, step_of_checkpoint
from .policies import ResumePolicy
from .rollback import Rollback
from .run_context import RunContext, steps_text

logger = logging.getLogger(__name__)

#: The worst first: what an older checkpoint may make up for, and before that what proves damage.
_ORDER: tuple[type[CheckpointError], ...] = (CheckpointCorruptError, CheckpointUnreadableError, CheckpointLoadError)


class Restorer:
    """Searches for the checkpoint to begin with.

    Args:
        checkpointer: loads.
        run: that begins.
        policy: which steps to try.
        rollback: what becomes of those that follow.
        saves: whether the run is going to save by itself.

    Attributes:
        loaded: the path of the checkpoint that was loaded last.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        run: RunContext,
        policy: ResumePolicy,
        rollback: Rollback,
        saves: bool,
    ) -> None:
        self._checkpointer = checkpointer
        self._run = run
        self._policy = policy
        self._rollback = rollback
        self._saves = saves
        self.loaded: str | None = None

    def load(self, state: dict[str, Any], strict: bool, allow_dtype_cast: bool) -> int | None:
        """Load the best step that is whole; see `CheckpointManager.restore`. Returns it, or None.

        What was found to be damaged is quarantined once an older checkpoint has been loaded in its place, or where
        there never was a checkpoint: until then it may be all there is. What follows is retired as late.

        Args:
            state: filled in place.
            strict: refuse a checkpoint that lacks keys of the state.
            allow_dtype_cast: let the state's tensors take values of another dtype.
        """
        deadline = time.monotonic() + self._run.timeouts.stage + self._run.timeouts.close
        options = {"strict": strict}
        if allow_dtype_cast:
            options["allow_dtype_cast"] = True  # a reader of one's own may not know it
        ranks = self._run.ranks
        candidates, committed, suspects, occupied = ranks.meet("restore", None, lambda _: self._look(), deadline)
        tag = f"restore/{ranks.meetings['restore']}"
        step, path = self._load_first(candidates, suspects, state, tag, options)
        later = [other for other in occupied if step is None or other > step]
        moved = self._tidy_together(suspects, committed, later if self._policy.rewind else [], tag)
        left = [other for other in later if other not in moved]
        if self._run.ranks.is_leader and step is None:
            never = self._policy.choice == "never"
            why = "checkpoint.resume=never" if never else f"no checkpoint in {self._run.root}"
            logger.info("%s: starting from scratch", why)
        elif self._run.ranks.is_leader and left:
            logger.warning(
                "resumed from step %d although %s follow(s); saving those steps again will be refused "
                "(checkpoint.rewind=true retires them)",
                step,
                steps_text(left),
            )
        self.loaded = path
        self._rollback.settled = self._saves
        return step

    def _load_first(
        self,
        candidates: list[tuple[int, str]],
        suspects: list[int],
        state: dict[str, Any],
        tag: str,
        options: dict[str, bool],
    ) -> tuple[int | None, str | None]:
        """Load the first candidate that is whole, and add the damaged ones before it to the suspects."""
        for number, (step, path) in enumerate(candidates):
            started = time.perf_counter()
            try:
                size = self._load_together(path, state, f"{tag}/{number}", options)
            except CheckpointCorruptError as error:
                if number + 1 == len(candidates):
                    raise
                logger.error("step %d cannot be used, trying step %d: %s", step, candidates[number + 1][0], error)
                # What cannot be read may be all right: the disk or the mount is not.
                if not isinstance(error, CheckpointUnreadableError):
                    suspects.append(step)
                continue
            if self._run.ranks.is_leader:
                self._log_loaded(step, path, time.perf_counter() - started, *size)
            return step, path
        return None, None

    def _look(self) -> list[Any]:
        """On the leading rank.

        Returns:
            The steps to try with their paths, best first; all that are committed; those to quarantine; and all that a
            save would meet.
        """
        self._clean_up()
        scan = self._run.scan()
        bad = {**scan.damaged, **scan.torn, **scan.unusable}
        for step, why in sorted(bad.items()):
            logger.error("step %d is not a usable checkpoint: %s", step, why)
        for why in scan.unfinished.values():
            logger.warning("%s; it is no checkpoint, and left alone", why)
        for why in scan.foreign.values():
            logger.warning("%s, so it is not taken for a checkpoint of this run and left alone", why)
        self._run.warned.update(bad.values(), scan.foreign.values())
        candidates = self._candidates(scan)
        if self._saves and not self._policy.searches and not self._policy.rewind:
            chosen = candidates[0][0] if candidates else None
            self._rollback.refuse([step for step in scan.occupied if chosen is None or step > chosen], chosen)
        suspects = sorted({**scan.damaged, **scan.torn}) if self._policy.searches else []
        return [candidates, scan.committed, suspects, sorted(scan.occupied)]

    def _candidates(self, scan: Scan) -> list[tuple[int, str]]:
        policy, bad = self._policy, {**scan.damaged, **scan.torn, **scan.unusable}
        if policy.path is not None:
            return [(step_of_checkpoint(self._run.fs, policy.path), policy.path)]
        other = committed_under_other_names(self._run.fs, self._run.root, self._run.names)
        if isinstance(policy.choice, int):
            if policy.choice in bad:
                raise _kind_of(policy.choice, scan)(
                    f"checkpoint.resume={policy.choice}, and that checkpoint cannot be used: {bad[policy.choice]}"
                )
            refuse_absent_step(policy.choice, scan.committed, self._run.root, other)
            return [(policy.choice, self._run.path_of(policy.choice))]
        if policy.choice == "never":
            return []
        # A folder that has a manifest was a checkpoint once, so starting from scratch beside it is surely not meant.
        lost = {**scan.damaged, **scan.unusable}
        if lost and not scan.committed:
            newest = max(lost)
            raise _kind_of(newest, scan)(
                f"{self._run.root} holds checkpoints, and none that can be used; the newest: {lost[newest]} To start "
                "from scratch, use checkpoint.resume=never with another checkpoint.dir, or with checkpoint.rewind=true."
            )
        if scan.committed:
            if other is not None:
                logger.warning(
                    "%s also holds checkpoints up to step %d of checkpoint.naming=%s, which are not looked at",
                    self._run.root,
                    other[1][-1],
                    other[0],
                )
            return [(step, self._run.path_of(step)) for step in reversed(scan.committed)]
        refuse_others(self._run, scan, other)
        if policy.choice == "must":
            raise CheckpointNotFoundError(
                f"checkpoint.resume=must, but {self._run.root} has no committed checkpoint; "
                "use resume=auto to start from scratch."
            )
        return []

    def _log_loaded(self, step: int, path: str, seconds: float, size: int, checksums: bool) -> None:
        if not checksums:
            verified = "not verified: it has no checksums"
        else:
            verified = "checksums verified" if self._checkpointer.verifies else "not verified (checkpoint.verify=off)"
        logger.info("restored step %d from %s: %s in %.2f s, %s", step, path, amount(size), seconds, verified)

    def _tidy_together(self, suspects: list[int], committed: list[int], later: list[int], tag: str) -> list[int]:
        """Put away what is damaged and what is to be retired, and set the pointer right, on the leading rank.

        Returns:
            The steps that it moved.
        """
        if self._policy.choice == "never" and not later:
            return []
        deadline = time.monotonic() + self._run.timeouts.stage
        return list(
            self._run.ranks.run_on_leader(f"{tag}/tidy", lambda: self._tidy(suspects, committed, later), deadline)
        )

    def _tidy(self, suspects: list[int], committed: list[int], later: list[int]) -> list[int]:
        moved = self._rollback.retire(later)
        for step in sorted(set(suspects) - set(moved)):
            path = self._run.path_of(step)
            try:
                target = quarantine(self._run.fs, path)
            except OSError as error:
                logger.error("%s is damaged and could not be put out of the way: %s", path, error)
                continue
            logger.error("%s is damaged; it is kept as %s, which nothing uses or deletes", path, target)
            moved.append(step)
        repair_pointer(self._run.fs, self._run.root, self._run.names, [step for step in committed if step not in moved])
        return moved

    def _load_together(self, path: str, state: dict[str, Any], tag: str, options: dict[str, bool]) -> tuple[int, bool]:
        """Load a checkpoint on all ranks; what fails on one fails on all, and corrupt bytes are the worst.

        Returns:
            On the leading rank the bytes of the checkpoint, and whether it has checksums.
        """
        run, size = self._run, (0, False)
        failure: Exception | None = None
        try:
            if run.ranks.is_leader:
                size = size_of_checkpoint(run.fs, path)
            else:
                # A path that was named may be that of a file.
                wait_visible(lambda: run.fs.is_folder(path) or os.path.isfile(path), path, run.timeouts.visible)
            self._checkpointer.load_to_resume(path, state, **options)
        except Exception as error:
            failure = error
        if run.ranks.world_size == 1:
            if failure is not None:
                raise failure
            return size
        outcome = None if failure is None else [_ORDER.index(_kind_of_failure(failure)), str(failure)]
        # As long as the slowest rank needs to read its part.
        deadline = time.monotonic() + run.timeouts.stage + run.timeouts.write
        worst = run.ranks.decide(tag, outcome, _worst_failure, deadline)
        if worst is not None:
            raise _ORDER[worst[0]](worst[1]) from failure
        return size

    def _clean_up(self) -> None:
        """Wait, bounded, for what a dead run's writer still finishes; then delete what dead runs left."""
        deadline = time.monotonic() + self._run.timeouts.close
        logged = False
        while living := living_attempts(self._run.fs, self._run.root, self._run.names):
            if not logged:
                logger.info(
                    "waiting up to %g s for a checkpoint that another process finishes: %s",
                    self._run.timeouts.close,
                    living,
                )
                logged = True
            if time.monotonic() > deadline:
                logger.warning("%s is still being written by another process; going on without it", living)
                break
            time.sleep(0.05)
        for name in sweep(self._run.fs, self._run.root, self._run.names):
            logger.info("deleted %s, which a dead run left", name)


def _kind_of_failure(failure: Exception) -> type[CheckpointError]:
    """The error type under which the other ranks learn of a failure."""
    for kind in (CheckpointUnreadableError, CheckpointCorruptError):
        if isinstance(failure, kind):
            return kind
    return CheckpointLoadError


def _kind_of(step: int, scan: Scan) -> type[CheckpointError]:
    return CheckpointUnreadableError if step in scan.unusable else CheckpointCorruptError


def _worst_failure(outcomes: list[Any]) -> Any:
    """The failure that all ranks raise, with its rank in the text; None when every rank loaded its part."""
    failures = [(outcome[0], rank, outcome[1]) for rank, outcome in enumerate(outcomes) if outcome is not None]
    if not failures:
        return None
    order, rank, text = min(failures)
    return [order, f"Rank {rank}: {text}"]
