"""`RemoteKeeper`: a keeper in another process of this user on this host, over its socket; and all those of a run.

The answer to `open` has descriptors, a hundred in a frame.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

from ...outside import OUTSIDE, Outside
from ...processes.framing import Channel
from .connected_keeper import ANSWER_SECONDS, ConnectedKeeper
from .keeper_sockets import SocketPlace, roots_here, split_root
from .keepers import LocalPiece, Piece


class RemoteKeeper(ConnectedKeeper):
    """See the top of this file.

    Args:
        place: where the sockets of its run are
        rank: whose keeper it is
        user: whose process it must be; None: the user of this process
        seconds: how long it may take to answer
        now: connect now; False: with the first request, because the keeper may not have begun yet

    Raises:
        ConnectionError: there is no such keeper
        PermissionError: it is another user's process
        TimeoutError: it takes no connection
    """

    def __init__(
        self,
        place: SocketPlace,
        rank: int,
        *,
        user: int | None = None,
        seconds: float = ANSWER_SECONDS,
        now: bool = True,
    ) -> None:
        self._place = place
        self._user = os.getuid() if user is None else user
        super().__init__(rank, f"rank {rank}'s keeper", seconds, now=now, outside=place.outside)

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[Mapping[str, Piece | bytes]]:
        with ExitStack() as until_closed:
            descriptors = list[int]()
            with self._lock:
                channel, header, blob, fds = self._answer("open", path=folder)
                number, pending = header["number"], header["descriptors"]
                until_closed.callback(self._release, channel, number)
                for fd in fds:
                    until_closed.callback(os.close, fd)
                descriptors += fds
                while len(descriptors) < pending:
                    *_, more = self._received(channel)
                    for fd in more:
                        until_closed.callback(os.close, fd)
                    descriptors += more
            files, position = dict[str, Piece | bytes](), 0
            for name, size in header["small"]:
                files[name] = bytes(blob[position : position + size])
                position += size
            for name, source, base, length, more, is_replica in header["pieces"]:
                tail = bytes(blob[position : position + more])
                files[name] = LocalPiece(descriptors[source], base, length, tail, is_replica)
                position += more
            yield files

    def _dial(self) -> Channel:
        sock = self._place.connect(self._rank, self._seconds)
        if sock is None:
            raise self._gone()
        user, pid = self._outside.credentials(sock)
        if user != self._user:
            sock.close()
            text = f"rank {self._rank}'s keeper is a process of user {user}, not of user {self._user}"
            raise PermissionError(errno.EACCES, text)
        self._name = f"rank {self._rank}'s keeper (process {pid})"
        return Channel(sock, lambda: True, outside=self._outside)


def keepers_of(path: str, outside: Outside = OUTSIDE) -> list[RemoteKeeper]:
    """The keepers on this host of the run to whose memory a path belongs, by rank; the caller closes them.

    Args:
        path: of the memory, or below it
        outside: of this process

    Raises:
        PermissionError: the folder of the sockets, or a process behind one, is another user's
        TimeoutError: a keeper takes no connection
    """
    return HostKeepers(outside=outside)(path)


def each_of(keepers: list[RemoteKeeper]) -> Iterator[RemoteKeeper]:
    """Each keeper; closes all of them."""
    try:
        yield from keepers
    finally:
        for keeper in keepers:
            keeper.close()


def keepers_here() -> list[RemoteKeeper]:
    """The keepers of all runs of this user on this host; the caller closes them. Raises as `keepers_of`."""
    return [keeper for root, token in roots_here() for keeper in HostKeepers().at(SocketPlace(root, token))]


class HostKeepers:
    """Finds the keepers of runs on this host, and stays connected to them. Thread-safe.

    Args:
        besides: the rank whose keeper is left out, because it is in this process
        seconds: how long a keeper may take to answer
        outside: of this process
    """

    def __init__(
        self, *, besides: int | None = None, seconds: float = ANSWER_SECONDS, outside: Outside = OUTSIDE
    ) -> None:
        self._outside = outside
        self._besides = besides
        self._seconds = seconds
        self._lock = outside.lock()
        self._known: dict[tuple[SocketPlace, int], tuple[int, RemoteKeeper]] = {}

    def __call__(self, path: str) -> list[RemoteKeeper]:
        """The keepers of the run to whose memory a path belongs. Raises as `keepers_of`."""
        place = split_root(path)
        return [] if place is None else self.at(SocketPlace(*place, self._outside))

    def at(self, place: SocketPlace) -> list[RemoteKeeper]:
        """The keepers of a run. Raises as `keepers_of`."""
        with self._lock:
            found = list[RemoteKeeper]()
            for rank, number in sorted(place.ranks().items()):
                if rank == self._besides:
                    continue
                known = self._known.get((place, rank))
                if known is not None and known[0] == number and known[1].connected:
                    found.append(known[1])
                    continue
                try:
                    keeper = RemoteKeeper(place, rank, seconds=self._seconds)
                except ConnectionError:
                    continue  # a dead one's socket, which was removed
                self._known[place, rank] = number, keeper
                found.append(keeper)
            return found

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            while self._known:
                self._known.popitem()[1][1].close()
