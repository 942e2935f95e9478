"""Snapshot servers in other processes, as who asks them sees them.

What is open stays as it is until `release` or the end of the connection. All are asked as `ServerConnection` does.

- `HostClient`: a server of this user on this host, over its socket. The answer to `open` has descriptors, a hundred in
  a frame, so the bytes are read where they are.
- `PeerClient`: a server on another host, over TCP. Bytes come when they are first read. A load opens files more than
  once, as it verifies all bytes before it changes a tensor. So what came stays in memory until `forget`, when the load
  is over: no byte is sent twice, and what is used is what was verified.
- `HostClients`, `JobClients`: all those of a run. A run is found by its token, which the owner file of its folder has.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..core.outside import OUTSIDE, Outside
from ..core.pages import map_private
from ..core.processes.framing import Channel
from .server_connection import ServerConnection
from .stores import ListedFile, LocalFile, ReadableFile, SnapshotStore
from .wire import PeerAddress, SocketPlace, connect_to_peer, memory_root, refuse_newer, roots_here, token_of

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


class SnapshotClient(ServerConnection, SnapshotStore):
    """A snapshot server; see the top of this file."""

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
        with self.lock:
            before = self._channel
            if (channel := self.reach()) is before:  # else it has begun with that
                self._answer(channel, "hold")

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


def clients_of(path: str, outside: Outside = OUTSIDE) -> Sequence[SnapshotClient]:
    """The servers on this host of the run to whose memory a path belongs, by rank; the caller closes them.

    Args:
        path: of the memory, or below it
        outside: of this process

    Raises:
        PermissionError: the folder of the sockets, or a process behind one, is another user's
        TimeoutError: a server takes no connection
    """
    return HostClients(outside=outside)(path)


def each_of(clients: Sequence[SnapshotClient]) -> Iterator[SnapshotClient]:
    """Each server; closes all of them."""
    try:
        yield from clients
    finally:
        for client in clients:
            client.close()


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
        self._outside = outside
        self._besides = besides
        self._seconds = seconds
        self._lock = outside.lock()
        self._known: dict[tuple[SocketPlace, int], tuple[int, HostClient]] = {}

    def __call__(self, path: str) -> Sequence[SnapshotClient]:
        """The servers of the run to whose memory a path belongs. Raises as `clients_of`."""
        return self.at(SocketPlace.of(path, self._outside)) if token_of(path) else []

    def at(self, place: SocketPlace) -> list[SnapshotClient]:
        """The servers of a run. Raises as `clients_of`."""
        with self._lock:
            found = list[SnapshotClient]()
            for rank, number in sorted(place.ranks().items()):
                if rank == self._besides:
                    continue
                known = self._known.get((place, rank))
                if known is not None and known[0] == number and known[1].connected:
                    found.append(known[1])
                    continue
                try:
                    client = HostClient(place, rank, seconds=self._seconds)
                except ConnectionError:
                    continue  # a dead one's socket, which was removed
                self._known[place, rank] = number, client
                found.append(client)
            return found

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            while self._known:
                self._known.popitem()[1][1].close()


#: Bytes of a request. Others wait for one thread's, so it is short; the way back and forth takes 0.1 ms of its 5.
_CHUNK_BYTES = 4 << 20


class PeerClient(SnapshotClient):
    """See the top of this file.

    Args:
        address: where it is
        secret: of its run
        seconds: how long it may take to answer
        now: connect now; False: with the first request
        outside: of this process

    Attributes:
        address: see above

    Raises:
        OSError: see `_dial`
    """

    def __init__(
        self,
        address: PeerAddress,
        secret: str,
        *,
        seconds: float = ANSWER_SECONDS,
        now: bool = True,
        outside: Outside = OUTSIDE,
    ) -> None:
        super().__init__(address.rank, str(address), seconds, outside)
        self.address, self._secret = address, secret
        #: Memory for images, and which chunks have come, by folder and name. A file in memory never changes.
        self._fetched: dict[tuple[str, str], tuple[memoryview, bytearray]] = {}
        if now:
            self.reach()

    def _dial(self) -> Channel:
        return connect_to_peer(self.address, self._secret, min(self._seconds, ANSWER_SECONDS), self._outside)

    def opened(self, folder: str) -> AbstractContextManager[Mapping[str, FetchedFile]]:
        return self._opened(folder, self._file_of, descriptors=False)

    def _file_of(self, opening: Opening, name: str, source: int, base: int, **about: Any) -> FetchedFile:
        length, key = about["length"], (opening.folder, name)
        memory, has_come = self._fetched.get(key, (None, bytearray()))
        if memory is None or memory.nbytes != length:
            memory = memoryview(map_private(length) if length else b"")  # taken as far as bytes come
            has_come = bytearray(-(-length // _CHUNK_BYTES))
            self._fetched[key] = memory, has_come
        return FetchedFile(**about, client=self, opening=opening, name=name, memory=memory, has_come=has_come)

    def forget(self) -> None:
        """Free the memory of what has come, once nobody reads it any more."""
        self._fetched.clear()

    def close(self) -> None:
        """Hang up, and free the memory."""
        super().close()
        self.forget()


@dataclass(frozen=True, kw_only=True)
class FetchedFile(ReadableFile):
    """A file of a `PeerClient`.

    Attributes:
        client: has it
        opening: with which it was opened
        name: its name
        memory: for its image
        has_come: which chunks of that have come
    """

    client: PeerClient
    opening: Opening
    name: str
    memory: memoryview
    has_come: bytearray
    is_here: ClassVar[bool] = False

    def fill_image(self, buffer: memoryview, offset: int) -> bool:
        end = offset + buffer.nbytes
        for chunk in _chunks(offset, end):
            if not self.has_come[chunk]:
                with self.client.lock:  # who has it waits for an answer, which has a deadline
                    if not self.has_come[chunk]:
                        start = chunk * _CHUNK_BYTES
                        part = self.memory[start : start + _CHUNK_BYTES]
                        deque(self.stream(start, part.nbytes, [part]), 0)
                        self.has_come[chunk] = True
        buffer[:] = self.memory[offset:end]
        return True

    def stream(self, offset: int, length: int, buffers: Iterable[memoryview]) -> Iterator[memoryview]:
        """Receive bytes before the tail once more, by one request; see `ServerConnection.stream`.

        Args:
            offset: of the first byte
            length: number of bytes
            buffers: where they go, one after the other
        """
        what = {"number": self.opening.number, "name": self.name, "offset": offset, "length": length}
        return self.client.stream(self.opening.channel, buffers, "read", **what)

    def ranges(self, places: bytes) -> memoryview:
        """Bytes of short ranges before the tail, one after the other, within a signed answer.

        Args:
            places: offset, length, offset, length, and so on, in 64 bits each
        """
        opening = self.opening
        return self.client.ask("ranges", places, on=opening.channel, number=opening.number, name=self.name)[1]

    def forget(self, offset: int, length: int) -> None:
        with self.client.lock:
            for chunk in _chunks(offset, min(offset + length, self.length)):
                self.has_come[chunk] = False


def _chunks(start: int, end: int) -> range:
    """The numbers of the chunks that have some of a range."""
    return range(start // _CHUNK_BYTES, -(-end // _CHUNK_BYTES))


class JobClients(HostClients):
    """Finds the servers of runs on all hosts of a job.

    Those on other hosts must be made known. Then all ranks have the same servers of a run, in the same order: what one
    has verified is what another one reads.

    Args:
        outside: of this process
    """

    def __init__(self, outside: Outside = OUTSIDE) -> None:
        super().__init__(outside=outside)
        #: By token and rank; None: it is on this host.
        self._of_runs: dict[tuple[str, int], PeerClient | None] = {}

    def know(self, token: str, secret: str, place: PeerAddress) -> None:
        """Remember a server.

        Args:
            token: of its run
            secret: of its run
            place: where it is
        """
        is_far = place.host != self._outside.host_name()
        client = PeerClient(place, secret, now=False, outside=self._outside) if is_far else None
        with self._lock:
            self._of_runs[token, place.rank] = client

    def forget(self) -> None:
        """Hang up on the servers of other hosts, and find those of this host alone."""
        with self._lock:
            while self._of_runs:
                if (client := self._of_runs.popitem()[1]) is not None:
                    client.close()

    def received(self) -> int:
        """Bytes of files that have come from the servers of other hosts that are known."""
        return sum(client.received for client in self._far())

    def end_load(self) -> None:
        """Free the memory of what has come from other hosts: a load is over."""
        for client in self._far():
            client.forget()

    def _far(self) -> list[PeerClient]:
        with self._lock:
            return [client for client in self._of_runs.values() if client is not None]

    def at(self, place: SocketPlace) -> list[SnapshotClient]:
        """See the base class; of a run that is known, on all hosts."""
        here = {client.rank: client for client in super().at(place)}
        with self._lock:
            known = {rank: client for (token, rank), client in self._of_runs.items() if token == place.token}
        found = {rank: there or here.get(rank) for rank, there in sorted(known.items())} if known else here
        return [client for client in found.values() if client is not None]


@dataclass(frozen=True)
class ServedRun:
    """A run that has servers on this host.

    Attributes:
        token: its token
        memory: the path of its memory
        folder: its folder of checkpoints, as a rank here has spelled it, or the URL
    """

    token: str
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
                return ServedRun(token, memory_of(token, about), str(about["root"]))
    return None


def memory_of(token: str, about: Mapping[str, Any]) -> str:
    """The path of the memory of a run, by what one of its servers says; an early one does not name it."""
    return str(about.get("memory") or memory_root(about["root"], token))
