"""`RemoteKeeper`: a keeper in another process of this user on this host, over its socket; and all those of a run.

A request is a frame with `ask` and its arguments; the answer is `done`, or `failed` with an errno and a text. The
answer to `open` has descriptors, a hundred in a frame; what is open stays as it is until `release` or the end of the
connection.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ...processes.framing import Channel, Frame
from .keeper_sockets import SocketPlace, peer_of, roots_here, split_root
from .keepers import Keeper, KeptFile, LocalPiece, Piece

logger = logging.getLogger("ckpt_component.storage")

#: How long a keeper may take to answer.
ANSWER_SECONDS = 10.0


class RemoteKeeper(Keeper):
    """See the top of this file. Its requests go one at a time over one connection.

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
        self._rank = rank
        self._user = os.getuid() if user is None else user
        self._seconds = seconds
        self._lock = threading.Lock()
        self._holds = False
        self._channel: Channel | None = None
        if now:
            self._connect()

    @property
    def rank(self) -> int:
        """Whose keeper it is."""
        return self._rank

    @property
    def connected(self) -> bool:
        """Whether the connection is of use, as far as is known."""
        channel = self._channel  # another thread may hang up meanwhile
        return channel is not None and self._process == os.getpid() and not channel.hung_up

    def listed(self, prefix: str) -> list[KeptFile]:
        return [KeptFile(*values) for values in self._asked("list", path=prefix)[0]["files"]]

    def get(self, path: str, limit: int) -> bytes:
        return bytes(self._asked("get", path=path, limit=limit)[1])

    def put(self, path: str, data: bytes, *, new: bool = True) -> None:
        self._asked("put", data, path=path, new=new)

    def delete(self, paths: Sequence[str]) -> None:
        self._asked("delete", paths=list(paths))

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
            for name, source, base, length, more in header["pieces"]:
                tail = bytes(blob[position : position + more])
                files[name] = LocalPiece(descriptors[source], base, length, tail)
                position += more
            yield files

    def about(self) -> dict[str, Any]:
        """What it is: root, token, rank, world_size, host, pid, since, bytes, lease, alive, and others."""
        return dict(self._asked("about")[0]["about"])

    def hold(self) -> None:
        """Have it stay while this object is connected, longer than its lease if need be."""
        self._holds = True
        self._asked("hold")

    def end(self) -> None:
        """Tell it to end: a newer run does not need it."""
        self._asked("end")

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._hang_up()

    def _asked(self, ask: str, data: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], memoryview]:
        with self._lock:
            _, header, blob, _ = self._answer(ask, data, **arguments)
        return header, blob

    def _answer(
        self, ask: str, data: bytes = b"", **arguments: Any
    ) -> tuple[Channel, dict[str, Any], memoryview, list[int]]:
        """Send a request and receive its answer, over a new connection after a fork or a late answer.

        And after the keeper's end, as another one may have taken its place.
        """
        if not self.connected:
            self._connect()
            if self._holds and ask != "hold":
                self._answer("hold")
        channel = self._channel
        if channel is None:
            raise self._gone()
        try:
            channel.send({"ask": ask, **arguments}, time.monotonic() + self._seconds, [data] if data else [])
        except TimeoutError:
            raise self._silent() from None
        except OSError as error:  # it has hung up, and may have said why
            logger.debug("rank %d's keeper did not take a request: %s", self._rank, error)
        return channel, *self._received(channel)

    def _received(self, channel: Channel) -> Frame:
        try:
            frame = channel.receive(time.monotonic() + self._seconds)
        except TimeoutError:
            raise self._silent() from None
        if frame is None:
            raise self._gone()
        header = frame[0]
        if header["kind"] != "done":
            code = header["errno"]
            raise OSError(code, header["error"], header["path"]) if code else OSError(errno.EIO, header["error"])
        return frame

    def _release(self, channel: Channel, number: int) -> None:
        """Give back what is open, which the end of the connection does, too."""
        with self._lock:
            if channel is self._channel and self.connected:
                try:
                    self._answer("release", number=number)
                except OSError as error:  # it has hung up, and what was read is right
                    logger.info("%s, after its files were read", error)

    def _connect(self) -> None:
        self._hang_up()
        sock = self._place.connect(self._rank, self._seconds)
        if sock is None:
            raise self._gone()
        user, pid = peer_of(sock)
        if user != self._user:
            sock.close()
            text = f"rank {self._rank}'s keeper is a process of user {user}, not of user {self._user}"
            raise PermissionError(errno.EACCES, text)
        channel = Channel(sock, lambda: True)
        self._channel, self._pid, self._process = channel, pid, os.getpid()
        self._end = weakref.finalize(self, _close, channel, self._process)

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._end()
            self._channel = None

    def _silent(self) -> TimeoutError:
        self._hang_up()
        text = f"rank {self._rank}'s keeper (process {self._pid}) has not answered for {self._seconds:g} s"
        return TimeoutError(errno.ETIMEDOUT, f"{text}; it is stopped, or its host is overloaded")

    def _gone(self) -> ConnectionError:
        self._hang_up()
        return ConnectionResetError(errno.ECONNRESET, f"rank {self._rank}'s keeper has ended")


def _close(channel: Channel, process: int) -> None:
    """Close a connection, unless this is a fork of the process that made it and uses it still."""
    if os.getpid() == process:
        channel.close()


def keepers_of(path: str) -> list[RemoteKeeper]:
    """The keepers on this host of the run to whose memory a path belongs, by rank; the caller closes them.

    Raises:
        PermissionError: the folder of the sockets, or a process behind one, is another user's
        TimeoutError: a keeper takes no connection
    """
    return HostKeepers()(path)


def keepers_here() -> list[RemoteKeeper]:
    """The keepers of all runs of this user on this host; the caller closes them. Raises as `keepers_of`."""
    return [keeper for root, token in roots_here() for keeper in HostKeepers().at(SocketPlace(root, token))]


class HostKeepers:
    """Finds the keepers of runs on this host, and stays connected to them. Thread-safe.

    Args:
        besides: the rank whose keeper is left out, because it is in this process
        seconds: how long a keeper may take to answer
    """

    def __init__(self, *, besides: int | None = None, seconds: float = ANSWER_SECONDS) -> None:
        self._besides = besides
        self._seconds = seconds
        self._lock = threading.Lock()
        self._known: dict[tuple[SocketPlace, int], tuple[int, RemoteKeeper]] = {}

    def __call__(self, path: str) -> list[RemoteKeeper]:
        """The keepers of the run to whose memory a path belongs. Raises as `keepers_of`."""
        place = split_root(path)
        return [] if place is None else self.at(SocketPlace(*place))

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
