"""Keeps snapshots in memory: a save becomes whole there first, in a queue beside that of its storage.

A save to storage is staged once and goes to both queues: in memory it may be whole, on all ranks, while an older one is
still being written. A save to memory alone goes to that queue only.

The newest one stays; with peers, also the last one of which other hosts have replicas. Servers there pull each rank's
files of a snapshot from its server, and the snapshot is at its peers when those of all ranks are. Only then is the one
dropped that was there before. One snapshot is pulled at a time, on a lane. When nobody pulls any more, the ranks agree
that the newest one comes next; those in between are skipped.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from ..callers.write_callers import MemoryCaller
from ..config.schema import Recovery
from ..core.commit.commit import new_attempt
from ..core.commit.protocol import Attempt
from ..core.coordination.connection import offered_address, reachable
from ..core.image.arena import Arena
from ..core.image.unchanged_files import ProvedReuse
from ..core.lane import Lane
from ..core.outside import Outside
from ..core.storage.space import amount
from ..core.storage.storage import Storage
from ..errors import CheckpointConfigError, CheckpointError
from ..events import SaveReport
from ..formats.writer import Writer
from ..managing.run_context import RunContext
from ..saving.attempts import SaveAttempts
from ..saving.context import Committed, NoRun, SaveContext, SaveRequest, Staged, report_of
from ..saving.repeated_warning import RepeatedWarning
from ..saving.retry import ErrorPolicy
from ..saving.save_queue import SaveHandle, SaveQueue, notify
from ..stagers.base import Snapshot
from .wire import PeerAddress

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
        """Called before the first snapshot; `then` is to be called, on another thread, when fewer snapshots stay."""

    def prepare(self, caller: MemoryCaller, timeout: float) -> None:
        """Called before each snapshot, on the thread for memory: this rank's server is to run, in so many seconds."""
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
    continues.

    Args:
        attempts: as for the base class
        context: its storages have that of the memory
        memory: where snapshots are kept
        **options: as for the base class
    """

    def __init__(self, attempts: SaveAttempts, context: SaveContext, *, memory: SnapshotMemory, **options: Any) -> None:
        super().__init__(attempts, context, **options)
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
        self._beside = SaveQueue(self._kept, quiet, **{**options, "in_background": True, "name": "ckpt-keep"})
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
        self.misses.over()
        if snapshot is not None:  # else nothing was committed
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


@dataclass(frozen=True)
class PeerMap:
    """Who has replicas for whom, and how they get there.

    Attributes:
        of: for each rank, the home, the ranks that hold its replicas
        address: where other hosts reach this one
        secret: by which the servers of the run know each other
        bytes_per_second: the most that a rank sends, to all holders together; None: no limit
    """

    of: Sequence[Sequence[int]]
    address: str
    secret: str
    bytes_per_second: float | None = None

    def pulls(self, places: Sequence[Any]) -> list[list[tuple[Any, float | None]]]:
        """For each rank: the servers of those whose replicas it holds, and the most bytes to ask each for in a second.

        Args:
            places: where the servers of all ranks are
        """
        found: list[list[tuple[Any, float | None]]] = [[] for _ in self.of]
        for home, holders in enumerate(self.of):
            for holder in holders:
                rate = None if self.bytes_per_second is None else self.bytes_per_second / len(holders)
                found[holder].append((places[home], rate))
        return found

    @classmethod
    def agree(cls, run: RunContext, settings: Recovery) -> PeerMap:
        """On all ranks: who has replicas for whom, by `checkpoint.recovery`.

        Raises:
            CheckpointConfigError: a rank does not find the address of its host; on all ranks
        """
        ranks, hosts, given = run.ranks, run.hosts, settings.peers or {}
        deadline = ranks.outside.now() + run.timeouts.stage
        begun = ranks.scatter("peers/begin", offered_address(ranks.outside), partial(_begin, ranks.outside), deadline)
        of = [hosts.peer_ranks(rank, given, settings.replicas) for rank in range(ranks.world_size)]
        return cls(of, bytes_per_second=settings.max_bytes_per_second, **begun)


class SnapshotsAtPeers(NewestStays):
    """See the top of this file.

    Args:
        peers: who has replicas for whom
        caller: has the server pull; owned from now on
        run: the run, whose listeners are told what is at its peers
        on_first: called on all ranks, on the thread of the lane, when a snapshot is at its peers for the first time
    """

    def __init__(self, peers: PeerMap, caller: MemoryCaller, run: RunContext, on_first: Callable[[], None]) -> None:
        self._peers, self._caller, self._on_first = peers, caller, on_first
        self._ranks, self._timeouts, self._events = run.ranks, run.timeouts, run.events
        self.unseen = run.hosts.elsewhere(run.ranks.rank)
        #: Where this rank's server listens for other hosts; None: nowhere.
        self._place: PeerAddress | None = None
        # The end of the run does not wait for what is being pulled.
        self._lane, self._rounds = Lane("ckpt-peers", run.ranks.outside, newest_only=True), 0
        #: For what follows, which two threads change.
        self._changed = run.ranks.outside.condition()
        #: How many have become whole, the number of the last one about which the ranks have agreed whether it is
        #: pulled, and whether they do so.
        self._number, self._asked, self._pulling = 0, 0, False
        #: Paths. What was pulled and has not arrived stays until another one is, as other ranks may know better.
        self._at_peers = self._pulled = ""
        #: Of what is whole and may be pulled, by path: an older one than the newest may be next.
        self._reports = dict[str, SaveReport]()
        self._closing = False

    def begin(self, then: Callable[[], None]) -> None:
        """See the base class."""
        self._then = then
        self._lane.submit(self._pull_due)  # nothing yet; but a thread that cannot start ends the run now, not later

    def prepare(self, caller: MemoryCaller, timeout: float) -> None:
        """See the base class. It also lets other hosts in, as they may look for a snapshot once rank 0 has it whole."""
        super().prepare(caller, timeout)
        place, address = None, self._peers.address
        try:
            port = caller.listen(self._peers.secret, address, self._timeouts.close)
            place = PeerAddress(self._ranks.outside.host_name(), address, port, self._ranks.rank)
        except CheckpointError as error:
            logger.warning("rank %d's snapshot server cannot be reached from other hosts: %s", self._ranks.rank, error)
        self._place = place  # another one, if the server was started again

    def whole(self, report: SaveReport) -> None:
        """See the base class."""
        with self._changed:
            super().whole(report)
            self._number += 1
            self._reports[report.path] = report
            self._changed.notify_all()
        with contextlib.suppress(CheckpointError):  # the run ends
            self._lane.submit(self._pull_due)

    def paths(self) -> Sequence[str]:
        """The last one at its peers, the one that was pulled last, and the newest, which may be one of them.

        First waits until it is known whether the newest one is pulled: a snapshot that is, on any rank, stays on all.
        """
        with self._changed:
            known = lambda: self._pulling or self._asked >= self._number or self._closing  # noqa: E731
            self._changed.wait_for(known, self._timeouts.stage)
            return [*filter(None, (self._at_peers, self._pulled, self._newest))]

    def _pull_due(self) -> None:
        """On the lane: pull what is due. The ranks begin each round together."""
        if self._closing or self._asked >= self._number:
            return
        self._rounds += 1
        try:
            self._pull_next(f"peers/{self._rounds}")
        except BaseException as error:
            if not isinstance(error, _RunEnds):
                logger.exception("no more snapshots get to peers")
            self.close()

    def _pull_next(self, tag: str) -> None:
        """Agree which one all ranks pull next, and from where, and do so if all servers can be reached."""
        with self._changed:
            number, path = self._number, self._newest
        message, homes = {"number": number, "path": path, "at": self._place}, None
        try:
            deadline = self._ranks.outside.now() + self._timeouts.stage
            number, path, homes = self._ranks.scatter(tag, message, self._choose, deadline)
        except CheckpointError as error:
            logger.log(self._level, "%s is in memory, and does not get to its peers: %s", path, error)
        with self._changed:
            self._asked = number
            self._reports = {at: report for at, report in self._reports.items() if at in (path, self._newest)}
            if homes is not None:
                self._pulling, self._pulled = True, path
            self._changed.notify_all()
        arrived = homes is not None and self._pull(f"{tag}/arrived", path, homes)
        if arrived and not self._at_peers:
            self._on_first()
        with self._changed:
            self._pulling = False
            if arrived:
                self._at_peers = path
            self._changed.notify_all()
        if arrived:
            with contextlib.suppress(CheckpointError, RuntimeError):  # the run ends, and so does what stays
                self._then()

    def _choose(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """On the leading rank: what each rank pulls, and from where.

        What is whole on one rank has been written on all of them, though some may not know yet that it is whole.
        """
        newest = max(messages, key=lambda message: message["number"])
        places = [message["at"] for message in messages]
        parts = self._peers.pulls(places) if all(places) else [None] * len(places)
        return [[newest["number"], newest["path"], homes] for homes in parts]

    def _pull(self, tag: str, path: str, homes: Sequence[tuple[Sequence[Any], float | None]]) -> bool:
        """Pull a snapshot; returns whether it has arrived, on all ranks."""
        own = dict[str, Any]()
        deadline = self._ranks.outside.now() + self._timeouts.whole_save

        def pull() -> None:
            if self._closing:
                raise _RunEnds
            try:
                own.update(self._caller.pull(path, homes, deadline))
            except CheckpointError:
                if self._closing:
                    raise _RunEnds from None  # no rank waits for this one's answer
                raise

        try:
            self._ranks.all_succeed(tag, pull, self._caller.progress, deadline)
        except CheckpointError as error:
            text = "%s did not get to its peers; what they had before stays there: %s"
            logger.log(self._level, text, path, error)
            return False
        at = self._ranks.outside.date()
        with self._changed:  # this rank may not know yet that it is whole
            self._changed.wait_for(lambda: path in self._reports or self._closing, self._timeouts.stage)
            report = self._reports.get(path) or SaveReport(path, time=at)
        self._events.at_peers(replace(report, sent=own["sent"], at_peers_s=at - report.time))
        if self._ranks.is_leader:
            text = "step %s is at its peers: %s received by rank 0 in %.2f s"
            logger.info(text, report.step, amount(own["sent"]), own["seconds"])
        return True

    @property
    def _level(self) -> int:
        """Of failures, which the end of a run brings about."""
        return logging.DEBUG if self._closing else logging.WARNING

    def close(self) -> None:
        """Give up what is being pulled. A server that lives on still pulls it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._lane.stop()
        self._caller.close()


class _RunEnds(BaseException):
    """What is being pulled is given up, and the ranks do not agree on it."""


def _begin(outside: Outside, offered: Sequence[str]) -> list[Any]:
    """On the leading rank: what the server of each rank needs so that others know it."""
    addresses = reachable(offered, outside)
    if "" in addresses:
        raise CheckpointConfigError(
            f"checkpoint/recovery=peers: rank {addresses.index('')} does not find the address of its host (see its "
            "log); set MASTER_ADDR to a name that all hosts know, or use checkpoint/recovery=host."
        )
    secret = outside.random_bytes(32).hex()
    return [{"secret": secret, "address": address} for address in addresses]
