"""Which snapshots stay in memory: the newest; with peers, also the last one of which other hosts have replicas.

With peers, servers on other hosts pull each rank's files of a snapshot from its server, and the snapshot is at its
peers when those of all ranks are. Only then is the one dropped that was there before. One snapshot is pulled at a time,
on a lane. When nobody pulls any more, the ranks agree that the newest one comes next; those in between are skipped.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..callers.write_callers import MemoryCaller
from ..config.schema import Recovery
from ..core.coordination.connection import offered_address, reachable
from ..core.lane import Lane
from ..core.outside import Outside
from ..core.storage.space import amount
from ..errors import CheckpointConfigError, CheckpointError
from ..events import SaveReport
from ..managing.run_context import RunContext
from .snapshots import NewestStays
from .wire import PeerAddress

logger = logging.getLogger(__name__)


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
        except _RunEnds:
            self.close()
        except BaseException:
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


def _begin(outside: Outside, addresses: Sequence[str]) -> list[Any]:
    """On the leading rank: what the server of each rank needs so that others know it."""
    if "" in addresses:
        raise CheckpointConfigError(
            f"checkpoint/recovery=peers: rank {addresses.index('')} does not find the address of its host (see its "
            "log); set MASTER_ADDR to a name that all hosts know, or use checkpoint/recovery=host."
        )
    secret = outside.random_bytes(32).hex()
    return [{"secret": secret, "address": address} for address in reachable(addresses, outside)]
