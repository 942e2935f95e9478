"""Keeps snapshots in memory: a save becomes whole there first, in a queue beside that of its storage.

A save to storage is staged once and goes to both queues: in memory it may be whole, on all ranks, while an older one is
still being written. A save to memory alone goes to that queue only.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from ..callers.write_callers import MemoryCaller
from ..core.commit.commit import new_attempt
from ..core.commit.protocol import Attempt
from ..core.image.arena import Arena
from ..core.image.unchanged_files import ProvedReuse
from ..core.storage.storage import Storage
from ..errors import CheckpointError, CheckpointSaveError
from ..events import SaveReport
from ..formats.writer import Writer
from ..saving.attempts import SaveAttempts
from ..saving.context import Committed, NoRun, SaveContext, SaveRequest, Staged, report_of
from ..saving.repeated_warning import RepeatedWarning
from ..saving.retry import ErrorPolicy
from ..saving.save_queue import SaveHandle, SaveQueue, notify
from ..stagers.base import Snapshot

logger = logging.getLogger(__name__)

#: How long servers whose trainers have died wait for a rank of which there is no sign, in seconds.
_PATIENCE = 2.0


class NewestStays:
    """What stays in memory of a run on one host: the newest snapshot.

    Attributes:
        unseen: the ranks whose files this rank cannot see
    """

    unseen: frozenset[int] = frozenset()

    #: The path of the newest one that is whole.
    _newest = ""

    def begin(self, then: Callable[[], None]) -> None:
        """Called before the first snapshot.

        Args:
            then: to be called, on another thread, when fewer snapshots stay
        """

    def prepare(self, caller: MemoryCaller, timeout: float) -> None:
        """Called before each snapshot, on the thread for memory: have this rank's server run.

        Args:
            caller: calls the server
            timeout: seconds that it may take to start
        """
        caller.prepare(timeout)

    def whole(self, report: SaveReport) -> None:
        """On all ranks, on the thread for memory: the snapshot of a save is whole."""
        self._newest = report.path

    def paths(self) -> Sequence[str]:
        """On the thread for memory: the snapshots that stay; see `MemoryCaller.retire`."""
        return [self._newest]

    def close(self) -> None:
        """End what is going on."""


@dataclass(frozen=True)
class SnapshotMemory:
    """Where the snapshots of a run are in memory, and who has a part in that.

    Attributes:
        caller: runs the requests whose target is there; owned by the queue
        writer: the format
        storage: of what is kept
        root: folder of the checkpoints there, which have the names that they have in storage
        on_kept: called on rank 0, on the thread of the memory, when a snapshot is whole; a failure is only logged
        stays: which snapshots stay; owned too
    """

    caller: MemoryCaller
    writer: Writer
    storage: Storage
    root: str
    on_kept: Sequence[Callable[[SaveReport], None]] = ()
    stays: NewestStays = field(default_factory=NewestStays)


class TieredSaveQueue(SaveQueue):
    """Completes saves like its base class, which it is for storage, and has a queue beside it for memory.

    A save to storage tells of itself once. If its snapshot does not become whole in memory, that is a warning; the save
    goes on.

    Args:
        attempts: as for the base class, and the next three too
        context: its storages have that of the memory
        in_background: see above
        add_report: see above
        memory: where snapshots are kept
    """

    def __init__(
        self,
        attempts: SaveAttempts,
        context: SaveContext,
        *,
        in_background: bool,
        add_report: Callable[[SaveReport], None],
        memory: SnapshotMemory,
    ) -> None:
        super().__init__(attempts, context, in_background=in_background, add_report=add_report)
        self._memory, self._timeouts = memory, context.timeouts
        beside = replace(
            context,
            # The next snapshot comes soon, and what is saved to storage does not depend on this one.
            policy=ErrorPolicy(warn=True, min_free_bytes=None, reason="what is saved to storage is not affected"),
            timeouts=replace(context.timeouts, heartbeat=min(context.timeouts.heartbeat, _PATIENCE)),
            reuse=ProvedReuse(),
            queue="memory/",
            unseen=memory.stays.unseen,
        )
        self._kept = KeptSnapshots(memory, beside)
        # Nothing in its folders follows a snapshot.
        quiet = replace(beside, run=NoRun(context.storage_of))
        self._beside = SaveQueue(self._kept, quiet, in_background=True, add_report=add_report, name="ckpt-keep")
        memory.stays.begin(partial(self._beside.run_after_saves, self._kept.drop_others))
        #: Where the newest snapshot of this run is, or will be, in memory.
        self._newest = ""
        self._is_beside_idle = True

    def submit(self, staged: Staged) -> SaveHandle:
        """Complete a save after those so far; one to storage in memory too. See the base class."""
        request = staged.admitted.request
        if request.storage is self._memory.storage:
            self._newest = request.path
            return self._beside.submit(self._at(request, staged))
        path, before = os.path.join(self._memory.root, os.path.basename(request.path)), self._newest
        self._newest = path
        if path != before:  # else the step is in memory, and now goes to storage too
            # Replicas are compared once, when the save to storage begins.
            double = replace(request, path=path, storage=self._memory.storage, is_told=False)
            self._keep_too(self._at(double, replace(staged, comparison=None)))
        return super().submit(staged)

    def _at(self, request: SaveRequest, staged: Staged) -> Staged:
        """A staged save as one to memory, where no other run can take the folder over."""
        attempt = new_attempt(self._memory.storage, request.path, staged.admitted.token)
        return replace(staged, admitted=replace(staged.admitted, request=request), attempt=attempt)

    def _keep_too(self, staged: Staged) -> None:
        """Have the snapshot of a save to storage become whole in memory."""
        snapshot = staged.snapshot
        if snapshot is not None:
            snapshot.hold()
        try:
            self._beside.run_after_saves(partial(self._kept.try_once, staged))
        except BaseException:
            if snapshot is not None:
                snapshot.release()
            raise

    def refuse(self, request: SaveRequest, error: CheckpointError) -> SaveHandle:
        """End a save that failed before anything was copied; see the base class. Those to memory are counted apart."""
        if request.storage is self._memory.storage:
            return self._beside.refuse(request, error)
        return super().refuse(request, error)

    def drain(self, timeout: float) -> bool:
        """Wait for both queues; see the base class. That of the memory has as long as its last save may take."""
        limit = self._timeouts.whole_save
        self._is_beside_idle = self._beside.drain(limit)
        if not self._is_beside_idle:
            logger.warning("a snapshot was still not whole in memory after %g s; it is given up", limit)
        return super().drain(timeout)

    def close(self, *, wait: bool) -> None:
        """End both threads, and let go of the snapshots that were kept: the server has them, or ends too."""
        self._memory.stays.close()
        super().close(wait=wait)
        with contextlib.suppress(CheckpointError, RuntimeError):  # the interpreter exits, which frees it too
            self._beside.run_after_saves(self._kept.release)  # there, because a save that was given up may end yet
        self._beside.close(wait=wait and self._is_beside_idle)
        self._kept.misses.end()
        self._memory.caller.close(self._timeouts.close)


class KeptSnapshots(SaveAttempts):
    """Makes attempts in memory, and keeps what those were made of that stay; the others are dropped.

    Args:
        memory: where, and which ones stay
        context: what is the same for all saves to memory

    Attributes:
        misses: warns of those that did not become whole
    """

    def __init__(self, memory: SnapshotMemory, context: SaveContext) -> None:
        super().__init__(memory.caller, memory.writer, context)
        self._memory = memory
        # The folder is claimed before the first snapshot, as a restore believes the owner's servers only. Before later
        # ones it is not asked, so a disk that hangs keeps no snapshot from memory. A run that takes it over ends the
        # servers of this one.
        self._claim = cache(self._claim)
        self._snapshots: dict[str, Snapshot] = {}
        #: Those of dropped snapshots that other processes still read.
        self._lent: list[Arena] = []
        self.misses = RepeatedWarning(logger, "snapshots did not become whole in memory")

    def run(self, staged: Staged, attempt: Attempt, number: int) -> Committed:
        """Write and commit; see the base class. When this returns, those that do not stay are no longer in memory."""
        snapshot = staged.snapshot
        try:
            # The commit begins in the server of rank 0.
            self._memory.stays.prepare(self._memory.caller, self._timeouts.worker_start)
        except CheckpointError as error:
            staged = replace(staged, snapshot=None, error=error)  # so that all ranks hear of it
        committed = super().run(staged, attempt, number)
        if snapshot is None:
            raise CheckpointSaveError(f"{attempt.target} was committed without a snapshot of this rank.")
        self.misses.over()
        snapshot.hold()
        self._snapshots[attempt.target] = snapshot
        report = report_of(staged.admitted.request, "committed", staged, committed.written, committed)
        self._memory.stays.whole(report)
        self.drop_others()
        for hook in self._memory.on_kept if self._leads else ():
            notify(hook, report)
        return committed

    def try_once(self, staged: Staged) -> None:
        """Make one attempt at a save that goes to storage too; a failure is a warning. Lets go of its snapshot."""
        try:
            self.run(staged, staged.attempt, 1)
        except Exception as error:
            self.warn_of(staged.admitted.request.path, error)
        finally:
            if staged.snapshot is not None:
                staged.snapshot.release()

    def warn_of(self, path: str, error: BaseException) -> None:
        """Log that a snapshot did not become whole, or count it: they may be as frequent as steps."""
        text = "%s did not become whole in memory, and training continues (%s): %s"
        defect = None if isinstance(error, CheckpointError) else error
        self.misses.warn(text, path, self._context.policy.reason, error, defect=defect)

    def drop_others(self) -> None:
        """Drop the snapshots that do not stay any more."""
        stay, are_read = self._memory.stays.paths(), dict[int, bool]()
        try:
            are_read = self._memory.caller.retire(stay, self._timeouts.close)
        except CheckpointError as error:  # the newest one is whole on all ranks, whatever became of older ones
            logger.warning("%s is in memory, but an older snapshot could not be dropped: %s", stay[-1], error)
        dropped = [self._snapshots.pop(path) for path in self._snapshots.keys() - {*stay}]
        self._lent += [older.arena for older in dropped if older.arena is not None]
        for arena in self._lent:  # of one that is not listed, it is unknown whether it is read
            arena.awaited = are_read.get(arena.number, False)
            arena.reusable = arena.number in are_read and not arena.awaited
        self._lent = [arena for arena in self._lent if arena.awaited and not arena.closed]
        for older in dropped:
            older.release()

    def release(self) -> None:
        """Let go of all snapshots."""
        while self._snapshots:
            self._snapshots.popitem()[1].release()
