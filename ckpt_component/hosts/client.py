"""Snapshot servers in other processes, as who asks them sees them.

A request is a frame with `ask` and its arguments; the answer is `done`, or `failed` with an errno and a text. What is
open stays as it is until `release` or the end of the connection.

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
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from ..core.outside import OUTSIDE, Outside
from ..core.pages import map_private
from ..core.processes.framing import Channel, Frame
from ..core.processes.serve import as_os_error
from .stores import ListedFile, LocalFile, ReadableFile, SnapshotStore
from .wire import PeerAddress, SocketPlace, connect_to_peer, memory_root, refuse_newer, roots_here, token_of

logger = logging.getLogger("ckpt_component.storage")

#: How long a server may take to answer.
ANSWER_SECONDS = 10.0


class SnapshotClient(SnapshotStore):
    """See the top of this file. Its requests go one at a time over one connection.

    Args:
        rank: whose server it is
        name: what it is called in errors
        seconds: how long it may take to answer
        now: connect now; False: with the first request, because the server may not have begun yet
        outside: of this process

    Raises:
        OSError: see `_dial`
    """

    def __init__(self, rank: int, name: str, seconds: float, *, now: bool, outside: Outside = OUTSIDE) -> None:
        self._outside = outside
        self._rank = rank
        self._name = name
        self._seconds = seconds
        self._lock = outside.lock()
        self._holds = False
        self._channel: Channel | None = None
        self._process = 0
        if now:
            self._connect()

    @abstractmethod
    def _dial(self) -> Channel:
        """A new connection.

        Raises:
            ConnectionError: there is no such server
            PermissionError: it is somebody else's
            TimeoutError: it takes no connection
        """

    @property
    def rank(self) -> int:
        """Whose server it is."""
        return self._rank

    @property
    def connected(self) -> bool:
        """Whether the connection is of use, as far as is known."""
        channel = self._channel  # another thread may hang up meanwhile
        return channel is not None and self._process == self._outside.pid() and not channel.hung_up

    def listed(self, prefix: str) -> list[ListedFile]:
        return [ListedFile(*values) for values in self._asked("list", path=prefix)[0]["files"]]

    def get(self, path: str, limit: int) -> bytes:
        return bytes(self._asked("get", path=path, limit=limit)[1])

    def put(self, path: str, data: bytes, *, new: bool = True) -> None:
        self._asked("put", data, path=path, new=new)

    def delete(self, paths: Sequence[str]) -> None:
        self._asked("delete", paths=list(paths))

    def about(self) -> dict[str, Any]:
        """What it is: root, token, rank, world_size, host, pid, since, bytes, lease, alive, and others.

        A restore asks this first, so it raises OSError if the server is of a newer release, whose answers this one
        does not read.
        """
        about = dict(self._asked("about")[0]["about"])
        refuse_newer(about.get("version", 1), self._name)
        return about

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

        And after the server's end, as another one may have taken its place.
        """
        if not self.connected:
            self._connect()
            if self._holds and ask != "hold":
                self._answer("hold")
        channel = self._channel
        if channel is None:
            raise self._gone()
        try:
            channel.send({"ask": ask, **arguments}, self._outside.now() + self._seconds, [data] if data else [])
        except TimeoutError:
            raise self._silent() from None
        except OSError as error:  # it has hung up, and may have said why
            logger.debug("%s did not take a request: %s", self._name, error)
        return channel, *self._received(channel)

    def _received(self, channel: Channel) -> Frame:
        until = self._outside.now() + self._seconds
        try:
            with self._outside.waits.on(f"an answer from {self._name}", until) as wait:
                wait.for_all(channel.has_input_within)
                frame = channel.receive(until)
        except TimeoutError:
            raise self._silent() from None
        except ConnectionAbortedError:
            self._hang_up()
            raise
        if frame is None:
            raise self._gone()
        if frame[0]["kind"] != "done":
            raise as_os_error(frame[0])
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
        channel = self._dial()
        self._channel, self._process = channel, self._outside.pid()
        self._end = weakref.finalize(self, _close, channel, self._process)

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._end()
            self._channel = None

    def _silent(self) -> TimeoutError:
        self._hang_up()
        text = f"{self._name} has not answered for {self._seconds:g} s; it is stopped, or its host is overloaded"
        return TimeoutError(errno.ETIMEDOUT, text)

    def _gone(self) -> ConnectionError:
        self._hang_up()
        return ConnectionResetError(errno.ECONNRESET, f"{self._name} has ended")


def _files_in(header: Mapping[str, Any], blob: memoryview) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """The files of an answer to `open`: the name, source and base of each, and arguments of `ReadableFile`."""
    small, position = ((name, -1, 0, 0, size, False) for name, size in header["small"]), 0
    for name, source, base, length, size, is_replica in chain(small, header["pieces"]):
        tail = bytes(blob[position : position + size])
        yield name, source, base, {"length": length, "tail": tail, "is_replica": is_replica}
        position += size


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
        ConnectionError: there is no such server
        PermissionError: it is another user's process
        TimeoutError: it takes no connection
    """

    def __init__(
        self,
        place: SocketPlace,
        rank: int,
        *,
        seconds: float = ANSWER_SECONDS,
        now: bool = True,
    ) -> None:
        self._place = place
        super().__init__(rank, f"rank {rank}'s snapshot server", seconds, now=now, outside=place.outside)

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[Mapping[str, ReadableFile]]:
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
            yield {
                name: LocalFile(**file, descriptor=descriptors[source] if file["length"] else -1, base=base)
                for name, source, base, file in _files_in(header, blob)
            }

    def _dial(self) -> Channel:
        sock = self._place.connect(self._rank, self._seconds)
        if sock is None:
            raise self._gone()
        user, pid = self._outside.credentials(sock)
        if user != os.getuid():
            sock.close()
            text = f"rank {self._rank}'s snapshot server is a process of user {user}, not of user {os.getuid()}"
            raise PermissionError(errno.EACCES, text)
        self._name = f"rank {self._rank}'s snapshot server (process {pid})"
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
        received: bytes of files that have come

    Raises:
        ConnectionError: there is no such server
        PermissionError: it belongs to another run
        TimeoutError: it takes no connection
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
        self.address = address
        self._secret = secret
        self.received = 0
        #: What has come, by folder and name. A file in memory never changes.
        self._fetched: dict[tuple[str, str], _FetchedBytes] = {}
        super().__init__(address.rank, str(address), seconds, now=now, outside=outside)

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[Mapping[str, FetchedFile]]:
        """Open the files of a folder; see the base class."""
        with ExitStack() as until_closed:
            with self._lock:
                channel, header, blob, _ = self._answer("open", path=folder, descriptors=False)
                number = header["number"]
            until_closed.callback(self._release, channel, number)
            files, identities = dict[str, FetchedFile](), header.get("identities", {})  # an earlier release has none
            for name, _, _, file in _files_in(header, blob):
                fetched = self._fetched.get((folder, name))
                if fetched is None or fetched.nbytes != file["length"]:
                    fetched = self._fetched[folder, name] = _FetchedBytes(file["length"], self._outside)
                place, identity = (channel, number, name), identities.get(name, "")
                files[name] = FetchedFile(**file, identity=identity, client=self, place=place, fetched=fetched)
            yield files

    def forget(self) -> None:
        """Free the memory of what has come, once nobody reads it any more."""
        self._fetched.clear()

    def close(self) -> None:
        """Hang up, and free the memory."""
        super().close()
        self.forget()

    def fetch(self, place: tuple[Channel, int, str], offset: int, buffer: memoryview) -> None:
        """Receive bytes of a file that is open.

        Args:
            place: the connection on which it was opened, the number of what was opened, and the name of the file
            offset: of the first byte
            buffer: to be filled

        Raises:
            OSError: ConnectionError if the server is gone, or that connection; TimeoutError if it is silent
        """
        with self._lock:
            for _ in self.stream(place, offset, buffer.nbytes, [buffer]):
                pass

    def stream(
        self, place: tuple[Channel, int, str], offset: int, length: int, buffers: Iterable[memoryview]
    ) -> Iterator[memoryview]:
        """Receive bytes of a file that is open, by one request, while nothing else is asked of this client.

        Args:
            place: as for `fetch`
            offset: of the first byte
            length: number of bytes
            buffers: where they go, one after the other

        Yields:
            Each buffer, when it is full.

        Raises:
            OSError: as `fetch`, or what `buffers` raises; the connection is then of no more use
        """
        channel, number, name = place
        if channel is not self._channel or not self.connected:
            raise self._gone()
        self._answer("read", number=number, name=name, offset=offset, length=length)
        try:
            for buffer in buffers:
                yield self._filled(channel, buffer)
        except BaseException:
            self._hang_up()
            raise

    def _filled(self, channel: Channel, buffer: memoryview) -> memoryview:
        try:
            is_there = channel.receive_into(buffer, self._outside.now() + self._seconds)
        except TimeoutError:
            raise self._silent() from None
        except OSError as error:
            raise self._gone() from error
        if not is_there:
            raise self._gone()
        self.received += buffer.nbytes
        return buffer

    def ranges(self, place: tuple[Channel, int, str], places: bytes) -> memoryview:
        """Bytes of short ranges of a file that is open, one after the other, within a signed answer.

        Args:
            place: as for `fetch`
            places: offset, length, offset, length, and so on, in 64 bits each
        """
        _, number, name = place
        return self._asked("ranges", places, number=number, name=name)[1]

    def _dial(self) -> Channel:
        return connect_to_peer(self.address, self._secret, self._seconds, self._outside)


class _FetchedBytes:
    """Memory for the bytes of a file, and which chunks of them have come.

    Args:
        nbytes: how many there are
        outside: of this process
    """

    def __init__(self, nbytes: int, outside: Outside) -> None:
        self.nbytes = nbytes
        #: Takes memory as far as bytes have come.
        self.memory = memoryview(map_private(nbytes) if nbytes else b"")
        chunks = -(-nbytes // _CHUNK_BYTES)
        self.has_come = bytearray(chunks)
        self.coming = [outside.lock() for _ in range(chunks)]


@dataclass(frozen=True, kw_only=True)
class FetchedFile(ReadableFile):
    """A file of a `PeerClient`.

    Attributes:
        client: has it
        place: see `PeerClient.fetch`
        fetched: what has come of it
    """

    client: PeerClient
    place: tuple[Channel, int, str]
    fetched: _FetchedBytes
    is_here: ClassVar[bool] = False

    def fill_image(self, buffer: memoryview, offset: int) -> bool:
        fetched, end = self.fetched, offset + buffer.nbytes
        for chunk in range(offset // _CHUNK_BYTES, -(-end // _CHUNK_BYTES)):
            with fetched.coming[chunk]:  # whoever fetches it has a deadline
                if not fetched.has_come[chunk]:
                    start = chunk * _CHUNK_BYTES
                    self.client.fetch(self.place, start, fetched.memory[start : start + _CHUNK_BYTES])
                    fetched.has_come[chunk] = True
        buffer[:] = fetched.memory[offset:end]
        return True

    def stream(self, offset: int, length: int, buffers: Iterable[memoryview]) -> Iterator[memoryview]:
        """Receive bytes before the tail anew; see `PeerClient.stream`."""
        return self.client.stream(self.place, offset, length, buffers)

    def ranges(self, places: bytes) -> memoryview:
        """Bytes before the tail; see `PeerClient.ranges`."""
        return self.client.ranges(self.place, places)

    def forget(self, offset: int, length: int) -> None:
        for chunk in range(offset // _CHUNK_BYTES, -(-min(offset + length, self.length) // _CHUNK_BYTES)):
            with self.fetched.coming[chunk]:
                self.fetched.has_come[chunk] = False


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
        self._of_runs: dict[str, dict[int, PeerClient | None]] = {}
        #: What those have received that are not known any more.
        self._received = 0

    def know(self, token: str, secret: str, place: PeerAddress) -> None:
        """Remember a server.

        Args:
            token: of its run
            secret: of its run
            place: where it is
        """
        with self._lock:
            is_far, known = place.host != self._outside.host_name(), self._of_runs.setdefault(token, {})
            known[place.rank] = PeerClient(place, secret, now=False, outside=self._outside) if is_far else None

    def forget(self) -> None:
        """Hang up on the servers of other hosts, and find those of this host alone."""
        with self._lock:
            while self._of_runs:
                for client in self._of_runs.popitem()[1].values():
                    if client is not None:
                        self._received += client.received
                        client.close()

    def received(self) -> int:
        """Bytes of files that have come from other hosts."""
        return self._received + sum(client.received for client in self._far())

    def end_load(self) -> None:
        """Free the memory of what has come from other hosts: a load is over."""
        for client in self._far():
            client.forget()

    def _far(self) -> list[PeerClient]:
        with self._lock:
            known = [client for clients in self._of_runs.values() for client in clients.values()]
        return [client for client in known if client is not None]

    def at(self, place: SocketPlace) -> list[SnapshotClient]:
        """See the base class; of a run that is known, on all hosts."""
        here = super().at(place)
        with self._lock:
            known = dict(self._of_runs.get(place.token, {}))
        if not known:
            return here
        by_rank = {client.rank: client for client in here}
        found = [there or by_rank.get(rank) for rank, there in sorted(known.items())]
        return [client for client in found if client is not None]


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
