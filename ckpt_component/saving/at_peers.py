"""Which snapshots stay in memory: the newest alone; or, with peers, also the last one of which other hosts have copies.

With peers, each rank's files of a snapshot are sent from its keeper to keepers on other hosts, and the snapshot is at
its peers when those of all ranks are. Only then is the one dropped that was there before. One snapshot is sent at a
time, on a lane. When nobody sends any more, the ranks agree that the newest one comes next; those in between are
skipped.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..callers.memory_caller import MemoryCaller
from ..core.coordination import Coordinator
from ..core.lane import Lane
from ..core.options import ResolvedTimeouts
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

    def begin(self, then: Callable[[], None]) -> None:
        """Called before the first snapshot.

        Args:
            then: to be called, on another thread, when fewer snapshots stay
        """

    def preparation(self, keeper: MemoryCaller) -> Callable[[float], None]:
        """What is called before each snapshot, on the thread for memory, with a timeout: it has the keeper run.

        Args:
            keeper: calls this rank's keeper
        """
        return keeper.prepare

    def whole(self, report: SaveReport) -> None:
        """On all ranks, on the thread for memory: the snapshot of a save is whole."""
        self._newest = report.path

    def paths(self) -> Sequence[str]:
        """On the thread for memory: the snapshots that stay; see `MemoryCaller.retire`."""
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


@dataclass(frozen=True)
class _Whole:
    """A snapshot that is whole: which one of the run, its save, and where this rank's keeper listens then."""

    number: int = 0
    report: SaveReport = field(default_factory=lambda: SaveReport(""))
    place: PeerAddress | None = None


class SnapshotsAtPeers(NewestStays):
    """See the top of this file.

    Args:
        peers: who has copies for whom
        caller: has the keeper send; owned from now on
        ranks: the ranks
        timeouts: deadlines
        events: is told what is at its peers
        on_first: called on all ranks, on the thread that sends, when a snapshot is at its peers for the first time
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
        self._place: PeerAddress | None = None
        # The end of the run does not wait for what is being sent.
        self._lane, self._rounds = Lane("ckpt-peers", ranks.outside, newest_only=True), 0
        #: For what follows, which two threads change.
        self._changed = ranks.outside.condition()
        self._last = _Whole()
        #: The number of the last one about which the ranks have agreed whether it is sent, and whether they do so.
        self._asked, self._sending = 0, False
        #: Paths. What was sent and has not arrived stays until another one is sent, as other ranks may know better.
        self._at_peers = self._sent = ""
        #: What is whole, by path, from the one that was agreed on last: an older one than the newest may be next.
        self._whole: dict[str, _Whole] = {}
        self._closing = False

    def begin(self, then: Callable[[], None]) -> None:
        """See the base class."""
        self._then = then
        self._lane.submit(self._send_due)  # nothing yet; but a thread that cannot start ends the run now, not later

    def preparation(self, keeper: MemoryCaller) -> Callable[[float], None]:
        """See the base class. It also lets other hosts in, as they may look for a snapshot once rank 0 has it whole."""

        def prepare(timeout: float) -> None:
            keeper.prepare(timeout)
            self._place = self._listening(keeper)

        return prepare

    def whole(self, report: SaveReport) -> None:
        """See the base class."""
        super().whole(report)
        with self._changed:
            self._last = self._whole[report.path] = _Whole(self._last.number + 1, report, self._place)
            self._changed.notify_all()
        with contextlib.suppress(CheckpointError):  # the run ends
            self._lane.submit(self._send_due)

    def paths(self) -> Sequence[str]:
        """The last one at its peers, the one that was sent last, and the newest, which may be one of them.

        First waits until it is known whether the newest one is sent: a snapshot that is, on any rank, stays on all.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_due or self._closing, self._timeouts.stage)
            return [*filter(None, (self._at_peers, self._sent, self._newest))]

    @property
    def _is_due(self) -> bool:
        """Whether the ranks are to agree on the newest one, now."""
        return not self._sending and self._last.number > self._asked

    def _listening(self, keeper: MemoryCaller) -> PeerAddress | None:
        """Where this rank's keeper, which may have been started again, listens for other hosts; None: nowhere."""
        try:
            port = keeper.listen(self._peers.secret, self._peers.address, self._timeouts.close)
        except CheckpointError as error:
            logger.warning("rank %d's keeper cannot be reached from other hosts: %s", self._ranks.rank, error)
            return None
        return PeerAddress(self._ranks.outside.host_name(), self._peers.address, port, self._ranks.rank)

    def _send_due(self) -> None:
        """On the lane: send what is due. The ranks begin each round together."""
        with self._changed:
            if self._closing or not self._is_due:
                return
            newest = self._last
        self._rounds += 1
        try:
            self._send_next(f"peers/{self._rounds}", newest)
        except _RunEnds:
            self.close()
        except BaseException:
            logger.exception("no more snapshots are sent to peers")
            self.close()

    def _send_next(self, tag: str, newest: _Whole) -> None:
        number, path, to = self._agree(tag, newest)
        with self._changed:
            self._asked = number
            self._whole = {at: whole for at, whole in self._whole.items() if whole.number >= number or at == path}
            if to:
                self._sending, self._sent = True, path
            self._changed.notify_all()
        if not to:
            return
        arrived = self._send(f"{tag}/sent", path, to)
        if arrived and not self._at_peers:
            self._on_first()
        with self._changed:
            self._sending = False
            if arrived:
                self._at_peers = self._sent
            self._changed.notify_all()
        if arrived:
            with contextlib.suppress(CheckpointError, RuntimeError):  # the run ends, and so does what stays
                self._then()

    def _agree(self, tag: str, newest: _Whole) -> tuple[int, str, list[PeerAddress]]:
        """The number and the path of what all ranks send next, and where to; nowhere, if a keeper cannot be reached."""
        message = {"number": newest.number, "path": newest.report.path, "at": newest.place}
        try:
            deadline = self._ranks.outside.now() + self._timeouts.stage
            number, path, to = self._ranks.scatter(tag, message, self._choose, deadline)
        except CheckpointError as error:
            logger.log(self._level, "%s is in memory, and is not sent to its peers: %s", newest.report.path, error)
            return newest.number, newest.report.path, []
        return number, path, [PeerAddress(*each) for each in to]

    def _choose(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """On the leading rank: what each rank sends, and where to.

        What is whole on one rank has been written on all of them, though some may not know yet that it is whole.
        """
        newest = max(messages, key=lambda message: message["number"])
        is_possible = all(message["at"] for message in messages)
        to = [[messages[peer]["at"] for peer in peers] if is_possible else [] for peers in self._peers.of]
        return [[newest["number"], newest["path"], each] for each in to]

    def _send(self, tag: str, path: str, to: Sequence[PeerAddress]) -> bool:
        """Send a snapshot; returns whether it has arrived, from all ranks."""
        own, limit = dict[str, Any](), self._peers.bytes_per_second
        deadline = self._ranks.outside.now() + self._timeouts.whole_save

        def send() -> None:
            if self._closing:
                raise _RunEnds
            try:
                own.update(self._caller.replicate(path, to, limit, deadline))
            except CheckpointError:
                if self._closing:
                    raise _RunEnds from None  # no rank waits for this one's answer
                raise

        try:
            self._ranks.all_succeed(tag, send, self._caller.progress, deadline)
        except CheckpointError as error:
            text = "%s did not get to its peers; what they had before stays there: %s"
            logger.log(self._level, text, path, error)
            return False
        at = self._ranks.outside.date()
        with self._changed:  # this rank may not know yet that it is whole
            self._changed.wait_for(lambda: path in self._whole or self._closing, self._timeouts.stage)
            report = self._whole[path].report if path in self._whole else SaveReport(path, time=at)
        self._events.at_peers(replace(report, sent=own["sent"], at_peers_s=at - report.time))
        if self._ranks.is_leader:
            text = "step %s is at its peers: %s sent by rank 0 in %.2f s"
            logger.info(text, report.step, amount(own["sent"]), own["seconds"])
        return True

    @property
    def _level(self) -> int:
        """Of failures, which the end of a run brings about."""
        return logging.DEBUG if self._closing else logging.WARNING

    def close(self) -> None:
        """Give up what is being sent. A keeper that lives on still sends it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._lane.stop()
        self._caller.close()


class _RunEnds(BaseException):
    """What is being sent is given up, and the ranks do not agree on it."""
