"""`JobKeepers`: the keepers of runs on all hosts of a job."""

from __future__ import annotations

from ...outside import OUTSIDE, Outside
from .connected_keeper import ConnectedKeeper
from .keeper_sockets import SocketPlace, split_root
from .peer_keeper import PeerKeeper
from .peer_sockets import PeerAddress
from .remote_keeper import HostKeepers


class JobKeepers:
    """Finds the keepers of runs, and stays connected to them: those on this host by their sockets. Thread-safe.

    Those on other hosts must be made known. Then all ranks have the same keepers of a run, in the same order: what one
    has verified is what another one reads.

    Args:
        outside: of this process
    """

    def __init__(self, outside: Outside = OUTSIDE) -> None:
        self._outside = outside
        self._here = HostKeepers(outside=outside)
        self._lock = outside.lock()
        #: By token and rank; None: it is on this host.
        self._known: dict[str, dict[int, PeerKeeper | None]] = {}
        #: What those have received that are not known any more.
        self._received = 0

    def know(self, token: str, secret: str, place: PeerAddress) -> None:
        """Remember a keeper.

        Args:
            token: of its run
            secret: of its run
            place: where it is
        """
        with self._lock:
            is_far, known = place.host != self._outside.host_name(), self._known.setdefault(token, {})
            known[place.rank] = PeerKeeper(place, secret, now=False, outside=self._outside) if is_far else None

    def forget(self) -> None:
        """Hang up on the keepers of other hosts, and find those of this host alone."""
        with self._lock:
            while self._known:
                for keeper in self._known.popitem()[1].values():
                    if keeper is not None:
                        self._received += keeper.received
                        keeper.close()

    def received(self) -> int:
        """Bytes of files that have come from other hosts."""
        return self._received + sum(keeper.received for keeper in self._far())

    def end_load(self) -> None:
        """Free the memory of what has come from other hosts: a load is over."""
        for keeper in self._far():
            keeper.forget()

    def _far(self) -> list[PeerKeeper]:
        with self._lock:
            known = [keeper for keepers in self._known.values() for keeper in keepers.values()]
        return [keeper for keeper in known if keeper is not None]

    def __call__(self, path: str) -> list[ConnectedKeeper]:
        """The keepers of the run to whose memory a path belongs, by rank. Raises as `HostKeepers`."""
        place = split_root(path)
        if place is None:
            return []
        here = {keeper.rank: keeper for keeper in self._here.at(SocketPlace(*place, self._outside))}
        with self._lock:
            known = dict(self._known.get(place[1], {}))
        if not known:
            return [*here.values()]
        found = [(rank, there or here.get(rank)) for rank, there in sorted(known.items())]
        return [keeper for _, keeper in found if keeper is not None]
