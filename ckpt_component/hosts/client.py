"""Snapshot servers in other processes, as who asks them sees them.

A request is a frame with `ask` and its arguments; the answer is `done`, or `failed` with an errno and a text. What is
open stays as it is until `release` or the end of the connection.

- `HostClient`: a server of this user on this host, over its socket. The answer to `open` has descriptors, a hundred in
  a frame, so the bytes are read where they are.
- `HostClients`: all those of a run on this host. A run is found by its token, which the owner file of its folder has.

Those on other hosts are in `peer_client`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from ..core.outside import OUTSIDE, Outside
from ..core.processes.framing import Channel, Frame
from ..core.processes.serve import as_os_error
from .stores import ListedFile, LocalFile, ReadableFile, SnapshotStore
from .wire import SocketPlace, memory_root, refuse_newer, roots_here, token_of

logger = logging.getLogger("ckpt_component.storage")

#: How long a server may take to answer.
ANSWER_SECONDS = 10.0
_File = TypeVar("_File", bound=ReadableFile)


class Opening(NamedTuple):
    """What a server has opened for a client: of which folder, over which connection, its number, and descriptors."""

    folder: str
    channel: Channel
    number: int
    fds: list[int]


class SnapshotClient(SnapshotStore):
    """Asks a server, one request at a time, over a connection that is made again when it is of no more use.

    That is after a fork, a late answer, or the server's end, as another one may have taken its place.

    Args:
        rank: whose server it is
        name: what it is called in errors
        seconds: how long it may take to answer
        outside: of this process

    Attributes:
        rank: see above
        lock: held during a request
        received: bytes that have followed answers
    """

    def __init__(self, rank: int, name: str, seconds: float = ANSWER_SECONDS, outside: Outside = OUTSIDE) -> None:
        self.rank, self._name, self._seconds, self._outside = rank, name, seconds, outside
        self.lock, self.received, self._process = outside.lock(), 0, 0
        self._channel: Channel | None = None
        #: What is asked first over each connection, if anything.
        self._begins_with = ""

    @abstractmethod
    def _dial(self) -> Channel:
        """A new connection.

        Raises:
            ConnectionError: there is no such server
            PermissionError: it is another user's, or of another run
            TimeoutError: it takes no connection
        """

    @property
    def connected(self) -> bool:
        """Whether the connection is of use, as far as is known."""
        channel = self._channel  # another thread may hang up at the same time
        return channel is not None and self._process == self._outside.pid() and not channel.hung_up

    def reach(self, on: Channel | None = None) -> Channel:
        """The connection, made again if need be; raises OSError, see `_dial`.

        Args:
            on: a connection that must still be this one, or ConnectionError is raised
        """
        channel = self._channel
        if channel is not None and self.connected and on in (None, channel):
            return channel
        if on is not None:
            raise self._ended()
        self._hang_up()
        channel, self._process = self._dial(), self._outside.pid()
        self._channel, self._end = channel, weakref.finalize(self, _close, channel, self._process)
        if self._begins_with:
            self._answer(channel, self._begins_with)
        return channel

    def ask(self, ask: str, data: bytes = b"", *, on: Channel | None = None, **arguments: Any) -> Frame:
        """Send a request, and receive its answer.

        Args:
            ask: what is asked
            data: bytes that go with it
            on: see `reach`
            **arguments: of the request

        Raises:
            OSError: what the server says; ConnectionError if it has ended, TimeoutError if it is silent
        """
        with self.lock:
            return self._answer(self.reach(on), ask, data, **arguments)

    def fill(self, on: Channel, buffer: memoryview, until: float = math.inf) -> None:
        """Receive bytes that follow an answer; raises as `ask`.

        Args:
            on: over which it came
            buffer: to be filled
            until: when they must have come, in seconds of `Outside.now`, if that is before an answer would have to
        """
        with self._in_words():
            if not on.receive_into(buffer, min(until, self._outside.now() + self._seconds)):
                raise ConnectionResetError
        self.received += buffer.nbytes

    def stream(self, on: Channel, buffers: Iterable[memoryview], ask: str, **arguments: Any) -> Iterator[memoryview]:
        """Ask for bytes, which follow the answer, while nothing else is asked; arguments as for `ask`.

        Yields:
            Each of the buffers, when it is full.

        Raises:
            OSError: as `ask`, or what `buffers` raises; the connection is then of no more use
        """
        self._answer(self.reach(on), ask, **arguments)
        try:
            for buffer in buffers:
                self.fill(on, buffer)
                yield buffer
        except BaseException:
            self._hang_up()
            raise

    def close(self) -> None:
        """Hang up."""
        with self.lock:
            self._hang_up()

    def _answer(self, channel: Channel, ask: str, data: bytes = b"", **arguments: Any) -> Frame:
        with self._in_words():
            try:
                channel.send({"ask": ask, **arguments}, self._outside.now() + self._seconds, [data] if data else [])
            except ConnectionError as error:  # it has hung up, and may have said why
                logger.debug("%s did not take a request: %s", self._name, error)
        return self._received(channel)

    def _received(self, channel: Channel) -> Frame:
        until = self._outside.now() + self._seconds
        with self._in_words(), self._outside.waits.on(f"an answer from {self._name}", until) as wait:
            wait.for_all(channel.has_input_within)
            frame = channel.receive(until)
            if frame is None:
                raise ConnectionResetError
        if frame[0]["kind"] != "done":
            raise as_os_error(frame[0])
        return frame

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        """Hang up when sending or receiving fails, and say who has failed."""
        try:
            yield
        except BaseException as error:
            self._hang_up()
            if isinstance(error, TimeoutError):
                text = f"has not answered for {self._seconds:g} s; it is stopped, or its host is overloaded"
                raise TimeoutError(errno.ETIMEDOUT, f"{self._name} {text}") from None
            if isinstance(error, OSError) and not isinstance(error, ConnectionAbortedError):
                raise self._ended() from error
            raise

    def _ended(self) -> ConnectionError:
        return ConnectionResetError(errno.ECONNRESET, f"{self._name} has ended")

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._end()
            self._channel = None

    # What it is asked

    def listed(self, prefix: str) -> list[ListedFile]:
        return [ListedFile(*values) for values in self.ask("list", path=prefix)[0]["files"]]

    def get(self, path: str, limit: int) -> bytes:
        return bytes(self.ask("get", path=path, limit=limit)[1])

    def put(self, path: str, data: bytes, *, new: bool = True) -> None:
        self.ask("put", data, path=path, new=new)

    def delete(self, paths: Sequence[str]) -> None:
        self.ask("delete", paths=list(paths))

    def about(self) -> dict[str, Any]:
        """What it is: root, token, rank, world_size, host, pid, since, bytes, lease, alive, and others.

        A restore asks this first, so it raises OSError if the server is of a newer release, whose answers this one
        does not read.
        """
        about = dict(self.ask("about")[0]["about"])
        refuse_newer(about.get("version", 1), self._name)
        return about

    def hold(self) -> None:
        """Have it stay while this object is connected, longer than its lease if need be."""
        self._begins_with = "hold"
        self.ask("hold")

    def end(self) -> None:
        """Tell it to end: a newer run does not need it."""
        self.ask("end")

    @contextlib.contextmanager
    def _opened(self, folder: str, file_of: Callable[..., _File], **options: Any) -> Iterator[Mapping[str, _File]]:
        """Open the files of a folder.

        Args:
            folder: see above
            file_of: makes each of them, given the `Opening`, the file's name, number of its descriptor, place in that,
                and arguments of `ReadableFile`
            **options: of the request
        """
        with ExitStack() as until_closed:
            with self.lock:
                channel = self.reach()
                header, blob, fds = self._answer(channel, "open", path=folder, **options)
                opening = Opening(folder, channel, header["number"], [])
                until_closed.callback(self._release, opening)
                while True:
                    opening.fds.extend(fds)
                    for fd in fds:
                        until_closed.callback(os.close, fd)
                    if len(opening.fds) >= header["descriptors"]:
                        break
                    *_, fds = self._received(channel)
            small, position = ((name, -1, 0, 0, size, False) for name, size in header["small"]), 0
            files, identities = dict[str, _File](), header.get("identities", {})  # an earlier release has none
            for name, source, base, length, size, is_replica in chain(small, header["pieces"]):
                about = {"length": length, "is_replica": is_replica, "identity": identities.get(name, "")}
                tail, position = bytes(blob[position : position + size]), position + size
                files[name] = file_of(opening, name, source, base, tail=tail, **about)
            yield files

    def _release(self, opening: Opening) -> None:
        """Give back what is open, which the end of the connection does, too."""
        try:
            self.ask("release", on=opening.channel, number=opening.number)
        except OSError as error:  # it has hung up, and what was read is right
            logger.info("%s, after its files were read", error)


def _close(channel: Channel, process: int) -> None:
    """Close a connection, unless this is a fork of the process that made it and uses it still."""
    if channel.outside.pid() == process:
        channel.close()


class HostClient(SnapshotClient):
    """See the top of this file.

    Args:
        place: where the sockets of its run are
        rank: whose server it is
        seconds: how long it may take to answer
        now: connect now; False: with the first request, because the server may not have begun yet

    Raises:
        OSError: see `_dial`
    """

    def __init__(self, place: SocketPlace, rank: int, *, seconds: float = ANSWER_SECONDS, now: bool = True) -> None:
        super().__init__(rank, f"rank {rank}'s snapshot server", seconds, place.outside)
        self._place = place
        if now:
            self.reach()

    def opened(self, folder: str) -> AbstractContextManager[Mapping[str, LocalFile]]:
        def file_of(opening: Opening, name: str, source: int, base: int, **about: Any) -> LocalFile:
            return LocalFile(**about, descriptor=opening.fds[source] if about["length"] else -1, base=base)

        return self._opened(folder, file_of)

    def _dial(self) -> Channel:
        sock = self._place.connect(self.rank, self._seconds)
        if sock is None:
            raise self._ended()
        user, pid = self._outside.credentials(sock)
        if user != os.getuid():
            sock.close()
            text = f"rank {self.rank}'s snapshot server is a process of user {user}, not of user {os.getuid()}"
            raise PermissionError(errno.EACCES, text)
        self._name = f"rank {self.rank}'s snapshot server (process {pid})"
        return Channel(sock, lambda: True, outside=self._outside)


class HostClients:
    """Finds the servers of runs on this host, and stays connected to them. Thread-safe.

    Args:
        besides: the rank whose server is left out, because it is in this process
        seconds: how long a server may take to answer
        outside: of this process
    """

    def __init__(
        self, *, besides: int | None = None, seconds: float = ANSWER_SECONDS, outside: Outside = OUTSIDE
    ) -> None:
        self._besides, self._seconds, self._outside, self._lock = besides, seconds, outside, outside.lock()
        self._known: dict[tuple[SocketPlace, int], tuple[int, HostClient]] = {}

    def __call__(self, path: str) -> Sequence[SnapshotClient]:
        """The servers of the run to whose memory a path belongs, by rank.

        Raises:
            PermissionError: the folder of the sockets, or a process behind one, is another user's
            TimeoutError: a server takes no connection
        """
        return self.at(SocketPlace.of(path, self._outside)) if token_of(path) else []

    def at(self, place: SocketPlace) -> list[SnapshotClient]:
        """The servers of a run; raises as a call."""
        with self._lock:
            found = list[SnapshotClient]()
            for rank, number in sorted(place.ranks().items()):
                if rank == self._besides:
                    continue
                known = self._known.get((place, rank))
                if known is None or known[0] != number or not known[1].connected:
                    try:
                        known = number, HostClient(place, rank, seconds=self._seconds)
                    except ConnectionError:
                        continue  # a dead one's socket, which was removed
                    self._known[place, rank] = known
                found.append(known[1])
            return found

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            while self._known:
                self._known.popitem()[1][1].close()


@dataclass(frozen=True)
class ServedRun:
    """A run that has servers on this host.

    Attributes:
        memory: the path of its memory
        folder: its folder of checkpoints, as a rank here has spelled it, or the URL
    """

    memory: str
    folder: str


def served_run(token: str, outside: Outside = OUTSIDE) -> ServedRun | None:
    """The run with a token; None: it has no server on this host.

    Args:
        token: see above
        outside: of this process

    Raises:
        PermissionError: the folder of the sockets, or a process behind one, is another user's
        TimeoutError: a server does not answer
    """
    for place in (SocketPlace(root, each, outside) for root, each in roots_here(outside) if each == token):
        for rank in sorted(place.ranks()):
            with contextlib.suppress(ConnectionError), contextlib.closing(HostClient(place, rank)) as client:
                about = client.about()  # all of them say the same, but one that has ended
                return ServedRun(memory_of(token, about), str(about["root"]))
    return None


def memory_of(token: str, about: Mapping[str, Any]) -> str:
    """The path of the memory of a run, by what one of its servers says; an early one does not name it."""
    return str(about.get("memory") or memory_root(about["root"], token))
