"""Keeps snapshots in memory: a save becomes whole there first, in a queue beside that of its storage.

A save to storage is staged once and goes to both queues: in memory it may be whole, on all ranks, while an older one is
still being written. A save to memory alone goes to that queue only.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..callers.memory_caller import MemoryCaller, Retired
from ..core.commit.commit import new_attempt
from ..core.commit.protocol import Attempt
from ..core.image.arena import Arena
from ..core.image.unchanged_files import ProvedReuse
from ..core.storage.storage import Storage
from ..errors import CheckpointError, CheckpointSaveError
from ..events import SaveReport
from ..formats.writer import Writer
from ..saving.attempts import SaveAttempts
from ..saving.context import Committed, Ownership, RunHooks, SaveContext, SaveRequest, Staged, report_of
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

    def __init__(self) -> None:
        self._newest = ""

    def begin(self, then: Callable[[], None]) -> None:
        """Called before the first snapshot.

        Args:
            then: to be called, on another thread, when fewer snapshots stay
        """

    def preparation(self, client: MemoryCaller) -> Callable[[float], None]:
        """What is called before each snapshot, on the thread for memory, with a timeout: it has the server run.

        Args:
            client: calls this rank's server
        """
        return client.prepare

    def whole(self, report: SaveReport) -> None:
        """On all ranks, on the thread for memory: the snapshot of a save is whole."""
        self._newest = report.path

    def paths(self) -> Sequence[str]:
        """On the thread for memory: the snapshots that stay; see `MemoryCaller.retire`."""
        return [self._newest]

    def close(self) -> None:
        """End what is going on."""


class TieredSaveQueue(SaveQueue):
    """Completes saves like its base class, which it is for storage, and has a queue beside it for memory.

    A save to storage tells of itself once. If its snapshot does not become whole in memory, that is a warning; the save
    goes on.

    Args:
        attempts: as for the base class, and the next three too
        context: its storages have that of the memory
        in_background: see above
        add_report: see above
        caller: runs the requests whose target is in memory; owned by the queue from now on
        writer: the format
        memory: the storage of what is kept
        path_of: where a checkpoint is in memory, by its path in storage
        on_kept: called on rank 0, on the thread of the memory, when a snapshot is whole there; a failure is only logged
        stays: which snapshots stay there; owned too
    """

    def __init__(
        self,
        attempts: SaveAttempts,
        context: SaveContext,
        *,
        in_background: bool,
        add_report: Callable[[SaveReport], None],
        caller: MemoryCaller,
        writer: Writer,
        memory: Storage,
        path_of: Callable[[str], str],
        on_kept: Callable[[SaveReport], None] = lambda report: None,
        stays: NewestStays | None = None,
    ) -> None:
        super().__init__(attempts, context, in_background=in_background, add_report=add_report)
        self._stays = NewestStays() if stays is None else stays
        beside = replace(
            context,
            run=MemoryHooks(context.run, on_kept),
            # The next snapshot comes soon, and what is saved to storage does not depend on this one.
            policy=ErrorPolicy(warn=True, min_free_bytes=None, reason="what is saved to storage is not affected"),
            timeouts=replace(context.timeouts, heartbeat=min(context.timeouts.heartbeat, _PATIENCE)),
            reuse=ProvedReuse(),
            queue="memory/",
            unseen=self._stays.unseen,
        )
        self._storage = memory
        self._path_of = path_of
        self._caller = caller
        self._timeouts = context.timeouts
        self._kept = KeptSnapshots(caller, writer, beside, self._stays)
        self._beside = MemorySaveQueue(self._kept, beside, in_background=True, add_report=add_report, name="ckpt-keep")
        self._stays.begin(partial(self._beside.run_after_saves, self._kept.drop_others))
        self._on_kept = beside.run.after_commit
        #: For the other queue, as `SaveQueue` has them: of saves to storage.
        self._doubles: deque[Staged] = deque()
        #: Where the newest snapshot of this run is, or will be, in memory.
        self._newest = ""
        self._is_beside_idle = True

    def submit(self, staged: Staged) -> SaveHandle:
        """Complete a save after those so far; one to storage in memory too. See the base class."""
        request = staged.admitted.request
        if request.storage is self._storage:
            self._newest = request.path
            return self._beside.submit(self._at(request, staged))
        path, before = self._path_of(request.path), self._newest
        self._newest = path
        if path != before:  # else the step is in memory, and now goes to storage too
            # Replicas are compared once, when the save to storage begins.
            double = replace(request, path=path, storage=self._storage, is_told=False)
            self._keep_too(self._at(double, replace(staged, comparison=None)))
        return super().submit(staged)

    def _at(self, request: SaveRequest, staged: Staged) -> Staged:
        """A staged save as one to memory, where no other run can take the folder over."""
        attempt = new_attempt(self._storage, request.path, staged.admitted.token)
        return replace(staged, admitted=replace(staged.admitted, request=request), attempt=attempt)

    def _keep_too(self, staged: Staged) -> None:
        """Have the snapshot of a save to storage become whole in memory."""
        if staged.snapshot is not None:
            staged.snapshot.hold()
        self._doubles.append(staged)
        try:
            self._beside.run_after_saves(self._finish_double)
        except BaseException:
            self._doubles.pop()
            if staged.snapshot is not None:
                staged.snapshot.release()
            raise

    def _finish_double(self) -> None:
        """On the thread for memory: make one attempt."""
        staged = self._doubles.popleft()
        request = staged.admitted.request
        try:
            committed = self._kept.run(staged, staged.attempt, 1)
        except Exception as error:
            self._kept.warn_of(request.path, error)
            return
        finally:
            if staged.snapshot is not None:
                staged.snapshot.release()
        if self._ranks.is_leader:
            notify(self._on_kept, report_of(request, "committed", staged, committed.written, committed))

    def refuse(self, request: SaveRequest, error: CheckpointError) -> SaveHandle:
        """End a save that failed before anything was copied; see the base class. Those to memory are counted apart."""
        if request.storage is self._storage:
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
        self._stays.close()
        super().close(wait=wait)
        with contextlib.suppress(CheckpointError, RuntimeError):  # the interpreter exits, which frees it too
            self._beside.run_after_saves(self._kept.release)  # there, because a save that was given up may end yet
        self._beside.close(wait=wait and self._is_beside_idle)
        self._kept.misses.end()
        self._caller.close(self._timeouts.close)


class MemorySaveQueue(SaveQueue):
    """The queue for memory, whose saves may be as frequent as steps."""

    _attempts: KeptSnapshots

    def _tolerate(self, path: str, error: BaseException) -> None:
        self._attempts.warn_of(path, error)


class KeptSnapshots(SaveAttempts):
    """Makes attempts in memory, and keeps what those were made of that stay; the others are dropped.

    Args:
        caller: runs the write requests
        writer: the format
        context: what is the same for all saves to memory
        stays: which ones stay

    Attributes:
        misses: warns of those that did not become whole
    """

    def __init__(self, caller: MemoryCaller, writer: Writer, context: SaveContext, stays: NewestStays) -> None:
        super().__init__(caller, writer, context)
        self._client = caller
        self._prepare = stays.preparation(caller)
        self._timeout = context.timeouts.close
        self._start_timeout = context.timeouts.worker_start
        self._reason = context.policy.reason
        self._stays = stays
        self._snapshots: dict[str, Snapshot] = {}
        #: Those of dropped snapshots that other processes still read.
        self._lent: list[Arena] = []
        self.misses = RepeatedWarning(logger, "snapshots did not become whole in memory")

    def run(self, staged: Staged, attempt: Attempt, number: int) -> Committed:
        """Write and commit; see the base class. When this returns, those that do not stay are no longer in memory."""
        snapshot = staged.snapshot
        try:
            self._prepare(self._start_timeout)  # the commit begins in the server of rank 0
        except CheckpointError as error:
            staged = replace(staged, snapshot=None, error=error)  # so that all ranks hear of it
        committed = super().run(staged, attempt, number)
        if snapshot is None:
            raise CheckpointSaveError(f"{attempt.target} was committed without a snapshot of this rank.")
        if self.misses.row:
            self.misses.over()
        snapshot.hold()
        self._snapshots[attempt.target] = snapshot
        self._stays.whole(report_of(staged.admitted.request, "committed", staged, committed.written, committed))
        self.drop_others()
        return committed

    def warn_of(self, path: str, error: BaseException) -> None:
        """Log that a snapshot did not become whole, or count it."""
        text = "%s did not become whole in memory, and training continues (%s): %s"
        defect = None if isinstance(error, CheckpointError) else error
        self.misses.warn(text, path, self._reason, error, defect=defect)

    def drop_others(self) -> None:
        """Drop the snapshots that do not stay any more."""
        stay, arenas = self._stays.paths(), Retired(set(), set())
        try:
            arenas = self._client.retire(stay, self._timeout)
        except CheckpointError as error:  # the newest one is whole on all ranks, whatever became of older ones
            logger.warning("%s is in memory, but an older snapshot could not be dropped: %s", stay[-1], error)
        for lent in self._lent:
            lent.reusable, lent.awaited = lent.number in arenas.unread, lent.number in arenas.read
        self._lent = [lent for lent in self._lent if lent.awaited and not lent.closed]
        for path in self._snapshots.keys() - {*stay}:
            older = self._snapshots.pop(path)
            arena = older.arena
            if arena is not None and arena.number in arenas.read:
                arena.awaited = True
                self._lent.append(arena)
            older.release(reusable=arena is None or arena.number in arenas.unread)

    def release(self) -> None:
        """Let go of all snapshots."""
        while self._snapshots:
            self._snapshots.popitem()[1].release()


class MemoryHooks:
    """How a run takes part in its saves to memory: it claims its folder, and is told what is whole.

    Args:
        run: how it takes part in its saves to storage
        on_kept: see `TieredSaveQueue`
    """

    def __init__(self, run: RunHooks, on_kept: Callable[[SaveReport], None]) -> None:
        self._run = run
        self.ownership: Ownership = FirstClaim(run.ownership)
        #: Called on the thread for memory before the save's future is done.
        self.after_commit = on_kept

    @property
    def files(self) -> Mapping[str, bytes]:
        """Those that every checkpoint has."""
        return self._run.files

    @property
    def manifest_fields(self) -> Mapping[str, Any]:
        """Those that every manifest has."""
        return self._run.manifest_fields

    def check_path(self, path: str) -> None:
        """The admission has looked: what memory keeps is the run's own."""

    def after_save(self, report: SaveReport) -> None:
        """`keep` does not count what is in memory."""

    def make_room(self) -> None:
        """Memory is not made by deleting checkpoints."""

    def close(self) -> None:
        """Nothing is open."""


class FirstClaim:
    """Claims the folder of a run before its first save to memory, as a restore believes the owner's servers only.

    Before later ones it does not ask, so a disk that hangs keeps no snapshot from memory. A run that takes the folder
    over ends the servers of this one.

    Args:
        ownership: of the folder
    """

    token = ""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._is_claimed = False

    def acquire(self) -> None:
        """Claim the folder, once."""
        if not self._is_claimed:
            self._ownership.acquire()
            self._is_claimed = True

    def check_after(self, error: Exception) -> None:
        """Raise if another run has taken the folder."""
        self._ownership.check_after(error)
