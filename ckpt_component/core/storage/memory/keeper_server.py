"""`KeeperServer`: answers, on a socket, those who read and write what this process keeps. See `remote_keeper`."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from ....errors import errno_of
from ...processes.framing import Channel
from ...processes.running import host_name
from .entrances import Entrance, HostEntrance
from .keeper_sockets import SocketPlace, split_root
from .keepers import LocalPiece, ServedKeeper

#: How long a client may take to take an answer.
_SEND_SECONDS = 10.0
#: Descriptors in a frame.
_MOST_FDS = 100
_PAUSE_SECONDS = 0.1
_JOIN_SECONDS = 1.0
#: Values, bytes and descriptors of a frame.
_Answer = tuple[dict[str, Any], list[bytes], list[int]]


class KeeperServer:
    """Listens on the socket of a rank, and for keepers and trainers of other hosts. Each connection has a thread.

    Args:
        kept: what this process keeps
        root: path of the run's memory, `host://...@TOKEN`
        rank: the trainer's
        about: what clients are told of the run: `root` (its durable root), `memory` (see `root` here), `world_size`,
            `since`, `lease`, `alive` and `gone`; called at each question
        take_replica: answers the request `replica` of a keeper that sends its files; None: it is refused
        user: whose processes may connect; None: the user of this process

    Attributes:
        ended: set when a newer run said that it does not need this keeper
    """

    def __init__(
        self,
        kept: ServedKeeper,
        root: str,
        rank: int,
        about: Callable[[], Mapping[str, Any]],
        take_replica: Callable[[Channel, Mapping[str, Any], memoryview], Iterator[dict[str, Any]]] | None = None,
        *,
        user: int | None = None,
    ) -> None:
        place = split_root(root)
        if place is None:
            raise ValueError(f"{root!r} is not the path of a run's memory, such as host://runs/one@1f2e3d4c-0a0b0c0d.")
        self._kept = kept
        self._place = SocketPlace(*place)
        self._rank = rank
        self._about = about
        self._take_replica = take_replica
        self._user = os.getuid() if user is None else user
        self._lock = threading.Lock()
        self._entrances: dict[Entrance, socket.socket] = {}
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._holding: set[Channel] = set()
        self.ended = threading.Event()

    @property
    def holders(self) -> int:
        """How many clients want this keeper to stay."""
        with self._lock:
            return len(self._holding)

    def start(self) -> None:
        """Listen, from now on.

        Raises:
            PermissionError: the folder of the sockets is another user's, or open to others
            OSError: the socket cannot be made
        """
        self.open(HostEntrance(self._place, self._rank, self._user))

    def open(self, entrance: Entrance) -> None:
        """Let clients in through one more entrance; raises OSError if it cannot be opened."""
        listener = entrance.open()
        with self._lock:
            self._entrances[entrance] = listener
        threading.Thread(target=self._accept, args=(entrance, listener), name="ckpt-keeper", daemon=True).start()

    def close(self) -> None:
        """Hang up on all clients, and remove the socket and the folders that are then empty. Safe to call twice."""
        with self._lock:
            entrances, self._entrances = self._entrances, {}
            connections = dict(self._connections)
        for entrance, listener in entrances.items():
            entrance.close()
            _shut(listener)  # wakes the thread that accepts
        for sock in connections:
            _shut(sock)
        until = time.monotonic() + _JOIN_SECONDS
        for thread in connections.values():
            thread.join(max(until - time.monotonic(), 0))

    def _accept(self, entrance: Entrance, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError as error:
                    if entrance not in self._entrances:
                        return
                    print(f"ckpt keeper: no connection could be taken: {error}", file=sys.stderr)
                    time.sleep(_PAUSE_SECONDS)  # descriptors may become free
                    continue
                thread = threading.Thread(
                    target=self._serve, args=(entrance, sock), name="ckpt-keeper-client", daemon=True
                )
                with self._lock:
                    if entrance not in self._entrances:
                        sock.close()
                        return
                    self._connections[sock] = thread
                    thread.start()

    def _serve(self, entrance: Entrance, sock: socket.socket) -> None:
        channel: Channel | None = None
        try:
            with contextlib.suppress(OSError):  # it hung up, or may not come in and was told so
                channel = entrance.admit(sock)
                self._answer_all(channel)
        finally:
            with self._lock:
                self._connections.pop(sock, None)
                if channel is not None:
                    self._holding.discard(channel)
            sock.close()

    def _answer_all(self, channel: Channel) -> None:
        open_now = dict[int, _OpenFolder]()
        with contextlib.ExitStack() as until_closed:
            until_closed.callback(_close_all, open_now)
            for number in itertools.count(1):
                try:
                    frame = channel.receive()
                except ConnectionAbortedError as error:
                    channel.send(failure_of(error), time.monotonic() + _SEND_SECONDS)
                    raise
                if frame is None:
                    return
                header, blob, _ = frame
                try:
                    for answer, data, fds in self._answers(channel, header, blob, number, open_now):
                        channel.send({"kind": "done", **answer}, time.monotonic() + _SEND_SECONDS, data, fds)
                except Exception as error:
                    # If the client does not take the answer in time, this raises, and the connection ends.
                    channel.send(failure_of(error), time.monotonic() + _SEND_SECONDS)

    def _answers(
        self,
        channel: Channel,
        header: Mapping[str, Any],
        blob: memoryview,
        number: int,
        open_now: dict[int, _OpenFolder],
    ) -> Iterator[_Answer]:
        """The frames that answer a request."""
        kept, ask = self._kept, header["ask"]
        if ask == "list":
            yield {"files": kept.listed(header["path"])}, [], []
        elif ask == "get":
            yield {}, [kept.get(header["path"], header["limit"])], []
        elif ask == "put":
            kept.put(header["path"], bytes(blob), new=header["new"])
            yield {}, [], []
        elif ask == "delete":
            kept.delete(header["paths"])
            yield {}, [], []
        elif ask == "open":
            folder = open_now[number] = _OpenFolder(kept, header["path"])
            yield from _opening(number, folder.files, passes_fds=header.get("descriptors", True))
        elif ask == "read":
            piece = open_now[header["number"]].piece(header["name"])
            yield {}, [], []
            _send_range(channel, piece, header["offset"], header["length"])
        elif ask == "release":
            open_now.pop(header["number"]).close()
            yield {}, [], []
        elif ask == "about":
            yield {"about": self._all_about()}, [], []
        elif ask == "hold":
            with self._lock:
                self._holding.add(channel)
            yield {}, [], []
        elif ask == "end":
            self.ended.set()
            yield {}, [], []
        elif ask == "replica" and self._take_replica is not None:
            for answer in self._take_replica(channel, header, blob):
                yield answer, [], []
        else:
            raise OSError(errno.EOPNOTSUPP, f"this keeper, of another release, does not know {ask!r:.100}")

    def _all_about(self) -> dict[str, Any]:
        return {
            **self._about(),
            "token": self._place.token,
            "rank": self._rank,
            "host": host_name(),
            "pid": os.getpid(),
            "bytes": self._kept.nbytes,
            "holders": self.holders,
        }


class _OpenFolder:
    """The files of a folder, open for one client.

    Args:
        kept: has them
        path: of the folder
    """

    def __init__(self, kept: ServedKeeper, path: str) -> None:
        with ExitStack() as until_closed:
            self.files = until_closed.enter_context(kept.opened(path))
            self._until_closed = until_closed.pop_all()

    def piece(self, name: str) -> LocalPiece:
        """A file that is no small one; raises FileNotFoundError."""
        piece = self.files.get(name)
        if not isinstance(piece, LocalPiece):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return piece

    def close(self) -> None:
        """Close them."""
        self._until_closed.close()


def _close_all(open_now: Mapping[int, _OpenFolder]) -> None:
    for each in open_now.values():
        each.close()


def _opening(number: int, files: Mapping[str, LocalPiece | bytes], *, passes_fds: bool) -> Iterator[_Answer]:
    """The frames that answer `open`: the first one says what is where, and how many descriptors come."""
    small = {name: content for name, content in files.items() if isinstance(content, bytes)}
    pieces = {name: content for name, content in files.items() if not isinstance(content, bytes)}
    fds = list(dict.fromkeys(piece.descriptor for piece in pieces.values()))
    places = {fd: place for place, fd in enumerate(fds)}
    fds = fds if passes_fds else []
    header = {
        "number": number,
        "descriptors": len(fds),
        "pieces": [
            [name, places[piece.descriptor], piece.base, piece.length, len(piece.tail), piece.is_replica]
            for name, piece in pieces.items()
        ],
        "small": [[name, len(data)] for name, data in small.items()],
    }
    yield header, [*small.values(), *(piece.tail for piece in pieces.values())], fds[:_MOST_FDS]
    for start in range(_MOST_FDS, len(fds), _MOST_FDS):
        yield {}, [], fds[start : start + _MOST_FDS]


def _send_range(channel: Channel, piece: LocalPiece, offset: int, length: int) -> None:
    """Send bytes of a file that lie before its tail; if there are fewer, the connection ends."""
    until = time.monotonic() + _SEND_SECONDS
    if channel.send_file(piece.descriptor, piece.base + offset, length, until) < length:
        channel.hang_up(listens=False)


def failure_of(error: Exception) -> dict[str, Any]:
    """The answer to a request that failed."""
    path = getattr(error, "filename", None)
    text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return {"kind": "failed", "errno": errno_of(error), "error": text, "path": path}


def _shut(sock: socket.socket) -> None:
    """End a connection, or what listens, in whichever thread uses it; that one closes it."""
    with contextlib.suppress(OSError):  # it has ended
        sock.shutdown(socket.SHUT_RDWR)
