"""Delete the checkpoints that `keep` no longer keeps, on a lane: a save waits only for room."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from ..core.commit.cleanup import RetentionPolicy, discard
from ..core.commit.scan import KnownSteps, Scan, warn_of_skipped
from ..core.lane import Lane
from .run_context import RunContext

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
