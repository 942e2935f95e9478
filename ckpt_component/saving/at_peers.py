"""Which snapshots stay in memory: the newest alone; or, with peers, also the last one of which other hosts have copies.

With peers, each rank's files of a snapshot are sent from its keeper to keepers on other hosts, and the snapshot is at
its peers when those of all ranks are. Only then is the one dropped that was there before. One snapshot is sent at a
time: when the next one has become whole, the ranks agree whether nobody is sending any more, and then it is sent; those
in between are skipped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from ..callers.memory_caller import MemoryCaller
from ..core.coordination import Coordinator
from ..core.options import ResolvedTimeouts
from ..core.processes.running import host_name
from ..core.storage.memory.peer_sockets import PeerAddress
from ..core.storage.space import amount
from ..errors import CheckpointError
from ..events import EventRecorder, SaveReport

logger = logging.getLogger(__name__)


class NewestStays:
    """What stays in memory of a run on one host: the newest snapshot.

    Attributes:
        unseen: the ranks whose files this rank cannot see
    """

    unseen: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._newest = ""

    def begin(self, keeper: MemoryCaller, then: Callable[[], None]) -> None:
        """Called before the first snapshot.

        Args:
            keeper: calls this rank's keeper; used only within `whole`
            then: to be called, on any thread, when fewer snapshots stay
        """

    def whole(self, token: str, report: SaveReport) -> None:
        """On all ranks, on the lane for memory: a snapshot is whole.

        Args:
            token: of its attempt
            report: of its save
        """
        self._newest = report.path

    def paths(self) -> Sequence[str]:
        """On the lane for memory: the snapshots that stay; see `MemoryCaller.retire`."""
        return [self._newest]

    def close(self) -> None:
        """End what is going on."""


@dataclass(frozen=True)
class PeerMap:
    """Who has copies for whom, and how they get there.

    Attributes:
        of: for each rank the ranks that have its copies
        unseen: the ranks on other hosts than this one
        address: where other hosts reach this one
        secret: by which the keepers of the run know each other
        bytes_per_second: the most that this rank sends; None: no limit
    """

    of: Sequence[Sequence[int]]
    unseen: frozenset[int]
    address: str
    secret: str
    bytes_per_second: float | None = None


class SnapshotsAtPeers(NewestStays):
    """See the top of this file.

    Args:
        peers: who has copies for whom
        caller: has the keeper send; owned from now on
        ranks: the ranks
        timeouts: deadlines
        events: is told what is at its peers
        on_first: called on all ranks, on the lane for memory, when a snapshot is at its peers for the first time
    """

    def __init__(
        self,
        peers: PeerMap,
        caller: MemoryCaller,
        ranks: Coordinator,
        timeouts: ResolvedTimeouts,
        events: EventRecorder,
        on_first: Callable[[], None],
    ) -> None:
        super().__init__()
        self.unseen = peers.unseen
        self._peers = peers
        self._caller = caller
        self._ranks = ranks
        self._timeouts = timeouts
        self._events = events
        self._on_first = on_first
        self._keeper, self._then = caller, _nothing
        self._at_peers = ""
        #: What was sent last, and whether it has arrived everywhere. If not, it stays until another one is sent, as
        #: other ranks may know better.
        self._sent, self._arrived = "", Future[bool]()
        self._arrived.set_result(False)
        #: The keeper's process, and where it listens.
        self._place: tuple[int | None, PeerAddress | None] = None, None
        self._closing = False

    def begin(self, keeper: MemoryCaller, then: Callable[[], None]) -> None:
        """See the base class."""
        self._keeper, self._then = keeper, then

    def whole(self, token: str, report: SaveReport) -> None:
        """See the base class. If nobody is sending any more, this one is sent."""
        super().whole(token, report)
        message = {"idle": self._arrived.done(), "at": self._listening()}
        try:
            deadline = self._ranks.clock.now() + self._timeouts.stage
            to = self._ranks.scatter(f"peers/{token}", message, self._choose, deadline)
        except CheckpointError as error:
            logger.warning("%s is in memory, and is not sent to its peers: %s", report.path, error)
            return
        if to is not None:
            self._settle()
            self._sent = report.path
            self._start(token, report, [PeerAddress(*each) for each in to])

    def paths(self) -> Sequence[str]:
        """The last one at its peers, the one that was sent last, and the newest, which may be one of them."""
        self._settle()
        return [*filter(None, (self._at_peers, self._sent, self._newest))]

    def _listening(self) -> PeerAddress | None:
        """Where this rank's keeper listens for other hosts; None, with a warning: it cannot."""
        pid, place = self._place
        if place is not None and pid == self._keeper.pid:
            return place
        try:
            port = self._keeper.listen(self._peers.secret, self._peers.address, self._timeouts.close)
        except CheckpointError as error:
            logger.warning("rank %d's keeper cannot be reached from other hosts: %s", self._ranks.rank, error)
            return None
        place = PeerAddress(host_name(), self._peers.address, port, self._ranks.rank)
        self._place = self._keeper.pid, place
        return place

    def _choose(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """On the leading rank: where each rank sends this snapshot; None: it is not sent."""
        if not all(message["idle"] and message["at"] for message in messages):
            return [None] * len(messages)
        return [[messages[peer]["at"] for peer in peers] for peers in self._peers.of]

    def _start(self, token: str, report: SaveReport, to: Sequence[PeerAddress]) -> None:
        """Send a snapshot on a thread of its own, which the end of the run does not wait for."""
        arrived = self._arrived = Future[bool]()

        def run() -> None:
            try:
                arrived.set_result(self._send(token, report, to))
            except BaseException as error:  # the run ends
                arrived.set_exception(error)

        arrived.add_done_callback(self._tell)
        threading.Thread(target=run, name="ckpt-peers", daemon=True).start()

    def _send(self, token: str, report: SaveReport, to: Sequence[PeerAddress]) -> bool:
        """Returns whether a snapshot has arrived, from all ranks."""
        own, limit = dict[str, Any](), self._peers.bytes_per_second
        deadline = self._ranks.clock.now() + self._timeouts.whole_save

        def send() -> None:
            try:
                own.update(self._caller.replicate(report.path, to, limit, deadline))
            except CheckpointError:
                if self._closing:
                    raise _RunEnds from None  # no rank waits for this one's answer
                raise

        try:
            self._ranks.all_succeed(f"peers/{token}/sent", send, self._caller.progress, deadline)
        except Exception as error:
            defect = None if isinstance(error, CheckpointError) else error
            text = "%s did not get to its peers; what they had before stays there: %s"
            logger.log(logging.DEBUG if self._closing else logging.WARNING, text, report.path, error, exc_info=defect)
            return False
        at = time.time()
        self._events.at_peers(replace(report, sent=own["sent"], at_peers_s=at - report.time))
        if self._ranks.is_leader:
            text = "step %s is at its peers: %s sent by rank 0 in %.2f s"
            logger.info(text, report.step, amount(own["sent"]), own["seconds"])
        return True

    def _tell(self, arrived: Future[bool]) -> None:
        """What was at the peers before need not stay."""
        if arrived.exception() is None and arrived.result():
            with contextlib.suppress(CheckpointError, RuntimeError):  # the run ends, and so does what stays
                self._then()

    def _settle(self) -> None:
        has_arrived = self._arrived.done() and self._arrived.exception() is None and self._arrived.result()
        if has_arrived and self._at_peers != self._sent:
            if not self._at_peers:
                self._on_first()
            self._at_peers = self._sent

    def close(self) -> None:
        """Give up what is being sent. A keeper that lives on still sends it."""
        self._closing = True
        self._caller.close()


class _RunEnds(BaseException):
    """What is being sent is given up, and the ranks do not agree on it."""


def _nothing() -> None:
    """Nobody is told."""
