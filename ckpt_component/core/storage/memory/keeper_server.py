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
from functools import partial
from typing import Any

from ....errors import errno_of
from ...processes.framing import Channel
from ...processes.running import host_name
from .keeper_sockets import SocketPlace, peer_of, split_root
from .keepers import LocalPiece
from .kept_files import KeptFiles

#: How long a client may take to take an answer.
_SEND_SECONDS = 10.0
#: Descriptors in a frame.
_MOST_FDS = 100
_PAUSE_SECONDS = 0.1
_JOIN_SECONDS = 1.0
#: Values, bytes and descriptors of a frame.
_Answer = tuple[dict[str, Any], list[bytes], list[int]]


class KeeperServer:
    """Listens on the socket of a rank. Each connection has a thread.

    Args:
        kept: what this process keeps
        root: path of the run's memory, `host://...@TOKEN`
        rank: the trainer's
        about: what clients are told of the run: `root` (its durable root), `world_size`, `since`, `lease`, `alive` and
            `gone`; called at each question
        user: whose processes may connect; None: the user of this process

    Attributes:
        ended: set when a newer run said that it does not need this keeper
    """

    def __init__(
        self, kept: KeptFiles, root: str, rank: int, about: Callable[[], Mapping[str, Any]], *, user: int | None = None
    ) -> None:
        place = split_root(root)
        if place is None:
            raise ValueError(f"{root!r} is not the path of a run's memory, such as host://runs/one@1f2e3d4c-0a0b0c0d.")
        self._kept = kept
        self._place = SocketPlace(*place)
        self._rank = rank
        self._about = about
        self._user = os.getuid() if user is None else user
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._number = 0
        self._connections: dict[Channel, threading.Thread] = {}
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
        self._listener, self._number = self._place.listen(self._rank)
        threading.Thread(target=self._accept, args=(self._listener,), name="ckpt-keeper", daemon=True).start()

    def close(self) -> None:
        """Hang up on all clients, and remove the socket and the folders that are then empty. Safe to call twice."""
        with self._lock:
            listener, self._listener = self._listener, None
            connections = dict(self._connections)
        if listener is None:
            return
        self._place.remove(self._rank, self._number)
        with contextlib.suppress(OSError):  # wakes the thread that accepts; it may have ended
            listener.shutdown(socket.SHUT_RDWR)
        for channel in connections:
            channel.hang_up(listens=False)
        until = time.monotonic() + _JOIN_SECONDS
        for thread in connections.values():
            thread.join(max(until - time.monotonic(), 0))

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError as error:
                    if self._listener is None:
                        return
                    print(f"ckpt keeper: no connection could be taken: {error}", file=sys.stderr)
                    time.sleep(_PAUSE_SECONDS)  # descriptors may become free
                    continue
                user, pid = peer_of(sock)
                channel = Channel(sock, partial(_may_live, pid))
                thread = threading.Thread(
                    target=self._serve, args=(channel, user), name=f"ckpt-keeper-{pid}", daemon=True
                )
                with self._lock:
                    if self._listener is None:
                        channel.close()
                        return
                    self._connections[channel] = thread
                    thread.start()

    def _serve(self, channel: Channel, user: int) -> None:
        try:
            with contextlib.suppress(OSError):  # it hung up
                if user != self._user:
                    text = f"this keeper belongs to user {self._user}, not to user {user}"
                    channel.send(_failure(PermissionError(errno.EACCES, text)), time.monotonic() + _SEND_SECONDS)
                    return
                self._answer_all(channel)
        finally:
            with self._lock:
                self._connections.pop(channel, None)
                self._holding.discard(channel)
            channel.close()

    def _answer_all(self, channel: Channel) -> None:
        open_now = dict[int, ExitStack]()
        with contextlib.ExitStack() as until_closed:
            until_closed.callback(_close_all, open_now)
            for number in itertools.count(1):
                frame = channel.receive()
                if frame is None:
                    return
                header, blob, _ = frame
                until = time.monotonic() + _SEND_SECONDS
                try:
                    for answer, data, fds in self._answers(channel, header, blob, number, open_now):
                        channel.send({"kind": "done", **answer}, until, data, fds)
                except Exception as error:
                    # If the client does not take the answer in time, this raises, and the connection ends.
                    channel.send(_failure(error), until)

    def _answers(
        self, channel: Channel, header: Mapping[str, Any], blob: memoryview, number: int, open_now: dict[int, ExitStack]
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
            open_now[number] = ExitStack()
            yield from _opening(number, open_now[number].enter_context(kept.opened(header["path"])))
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


def _close_all(open_now: Mapping[int, ExitStack]) -> None:
    for each in open_now.values():
        each.close()


def _opening(number: int, files: Mapping[str, LocalPiece | bytes]) -> Iterator[_Answer]:
    """The frames that answer `open`: the first one says what is where, and how many descriptors come."""
    small = {name: content for name, content in files.items() if isinstance(content, bytes)}
    pieces = {name: content for name, content in files.items() if not isinstance(content, bytes)}
    fds = list(dict.fromkeys(piece.descriptor for piece in pieces.values()))
    places = {fd: place for place, fd in enumerate(fds)}
    header = {
        "number": number,
        "descriptors": len(fds),
        "pieces": [
            [name, places[piece.descriptor], piece.base, piece.length, len(piece.tail)]
            for name, piece in pieces.items()
        ],
        "small": [[name, len(data)] for name, data in small.items()],
    }
    yield header, [*small.values(), *(piece.tail for piece in pieces.values())], fds[:_MOST_FDS]
    for start in range(_MOST_FDS, len(fds), _MOST_FDS):
        yield {}, [], fds[start : start + _MOST_FDS]


def _failure(error: Exception) -> dict[str, Any]:
    path = getattr(error, "filename", None)
    text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return {"kind": "failed", "errno": errno_of(error), "error": text, "path": path}


def _may_live(pid: int) -> bool:
    """Whether a client's process lives. Its connection may outlive it, in a process that it forked."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's, which is refused
    return True
