"""`SnapshotServer`: answers those who read and write what this process has, by a table of handlers.

Clients come in at endpoints: a socket of this host, for processes of this user, or a TCP port, for those who know the
secret of the run. Each connection has a thread (`ConnectionServer`). What is served is in memory (`MemoryStore`), or in
a folder of this host (`FolderStore`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ..core.outside import OUTSIDE, Outside, Thread
from ..core.processes.framing import Channel
from ..core.processes.serve import FrameRequest, Handler, Reply, answer_requests, failed_frame
from ..core.sockets import Socket
from ..core.storage.bucket_store import FOLDER_MARK
from ..core.storage.files import FileStorage
from ..core.storage.tree_removal import remove_if_empty
from .stores import ListedFile, LocalFile, MemoryStore, SnapshotStore
from .wire import VERSION, SocketPlace, greet_peer

logger = logging.getLogger(__name__)

_REFUSAL_SECONDS = 10.0


class Endpoint(ABC):
    """A way to a server, which is open when this is made.

    Attributes:
        listener: what listens; the server's from now on
    """

    listener: Socket

    @abstractmethod
    def admit(self, sock: Socket) -> Channel:
        """Let a client in.

        Args:
            sock: its connection

        Raises:
            OSError: it may not come in, as it was told, or it hung up
        """

    def close(self) -> None:
        """Remove what clients find it by."""


class HostEndpoint(Endpoint):
    """The socket of a rank, for processes of this user on this host. It takes the place of a predecessor's.

    Args:
        place: where the sockets of the run are
        rank: whose server it leads to

    Raises:
        OSError: as `SocketPlace.listen`
    """

    def __init__(self, place: SocketPlace, rank: int) -> None:
        self._place, self._rank = place, rank
        self.listener, self._number = place.listen(rank)

    def admit(self, sock: Socket) -> Channel:
        """Let a process of the user in; see the base class."""
        outside, own = self._place.outside, os.getuid()
        user, pid = outside.credentials(sock)
        # A connection may outlive its client's process, in one that it forked.
        channel = Channel(sock, partial(outside.is_running, pid), outside=outside)
        if user != own:
            text = f"this snapshot server belongs to user {own}, not to user {user}"
            error = PermissionError(errno.EACCES, text)
            channel.send(failed_frame(error, traced=False), outside.now() + _REFUSAL_SECONDS)
            raise error
        return channel

    def close(self) -> None:
        """Remove the socket, and the folders that are then empty; a failure is logged."""
        try:
            self._place.remove(self._rank, self._number)
        except OSError as error:
            logger.warning("the socket of rank %d's snapshot server stays until the next run: %s", self._rank, error)


class PeerEndpoint(Endpoint):
    """A free TCP port, for those who know the secret of the run.

    Args:
        address: an address of this host, or a name of one
        secret: of the run
        outside: of this process

    Attributes:
        address, secret: see above
        port: of TCP

    Raises:
        OSError: it cannot listen there
    """

    def __init__(self, address: str, secret: str, outside: Outside = OUTSIDE) -> None:
        self.address, self.secret, self._outside = address, secret, outside
        try:
            self.listener = outside.listen((address, 0))
        except OSError as error:
            why = error.strerror or error
            text = f"a snapshot server cannot listen on {address!r}, which is to be an address of this host: {why}"
            raise OSError(error.errno or errno.EADDRNOTAVAIL, text) from error
        self.port = int(self.listener.getsockname()[1])

    def admit(self, sock: Socket) -> Channel:
        """Let a client in that proves that it knows the secret; see the base class."""
        return greet_peer(sock, self.secret, self._outside)


#: How long a client may take to take an answer.
_SEND_SECONDS = 10.0
#: Bytes that a client may take so long to take.
_SENT_BYTES = 4 << 20
#: Descriptors in a frame.
_MOST_FDS = 100
_PAUSE_SECONDS = 0.1
_JOIN_SECONDS = 1.0


#: What answers the requests of a client, by what they ask, and those that get no answer; see `answer_requests`.
Table = tuple[Mapping[str, Handler], Mapping[str, Callable[[FrameRequest], object]]]


class ConnectionServer:
    """Takes the connections that come in at its endpoints. Each has a thread, which answers until it ends.

    Args:
        name: what takes them, for threads and errors
        table_for: makes the table for a client that was let in, given its connection, and what is closed at its end
        outside: of this process
    """

    def __init__(self, name: str, table_for: Callable[[Channel, ExitStack], Table], outside: Outside) -> None:
        self._name, self._table_for, self._outside, self._lock = name, table_for, outside, outside.lock()
        self._endpoints: set[Endpoint] = set()
        self._connections: dict[Socket, Thread] = {}

    def open(self, endpoint: Endpoint) -> None:
        """Let clients in through one more endpoint."""
        with self._lock:
            self._endpoints.add(endpoint)
        self._outside.start(f"ckpt-{self._name}", self._accept, endpoint)

    def close(self, seconds: float = _JOIN_SECONDS) -> None:
        """Close the endpoints, hang up on all clients, and wait for their threads so long. Safe to call twice."""
        with self._lock:
            endpoints, self._endpoints = self._endpoints, set()
            connections = dict(self._connections)
        for endpoint in endpoints:
            endpoint.close()
            self._shut(endpoint.listener)  # wakes the thread that accepts
        for sock in connections:
            self._shut(sock)
        until = self._outside.now() + seconds
        for thread in connections.values():
            thread.join(max(until - self._outside.now(), 0))

    def _shut(self, sock: Socket) -> None:
        """End a connection, or what listens, in whichever thread uses it; that one closes it."""
        with contextlib.suppress(OSError):  # it has ended
            self._outside.hang_up(sock, listens=False)

    def _accept(self, endpoint: Endpoint) -> None:
        with contextlib.closing(endpoint.listener):
            while True:
                try:
                    sock, _ = endpoint.listener.accept()
                except OSError as error:
                    if endpoint not in self._endpoints:
                        return
                    print(f"ckpt {self._name}: no connection could be taken: {error}", file=sys.stderr)
                    self._outside.sleep(_PAUSE_SECONDS)  # descriptors may become free
                    continue
                with self._lock:
                    if endpoint not in self._endpoints:
                        sock.close()
                        return
                    name = f"ckpt-{self._name}-client"
                    self._connections[sock] = self._outside.start(name, self._serve, endpoint, sock)

    def _serve(self, endpoint: Endpoint, sock: Socket) -> None:
        try:
            # It hung up, or may not come in and was told so.
            with contextlib.suppress(OSError), ExitStack() as until_closed:
                channel = endpoint.admit(sock)
                handlers, notes = self._table_for(channel, until_closed)
                how: dict[str, Any] = {"field": "ask", "seconds": _SEND_SECONDS, "traced": False}
                answer_requests(channel, handlers, _refuse_unknown, notes=notes, **how)
        finally:
            with self._lock:
                self._connections.pop(sock, None)
            sock.close()


@dataclass(eq=False)
class SnapshotServer(ConnectionServer):
    """Serves what a process has: on the socket of a rank, and to servers and trainers of other hosts.

    Args:
        kept: what this process keeps
        root: path of the run's memory, `host://...@TOKEN`
        rank: the trainer's
        about: what clients are told of the run: `root` (its durable root), `memory` (see `root` here), `world_size`,
            `since`, `lease`, `alive` and `gone`; called at each question
        outside: of this process

    Attributes:
        ended: a latch, set when a newer run said that it does not need this server
    """

    kept: MemoryStore | FolderStore
    root: str
    rank: int
    about: Callable[[], Mapping[str, Any]]
    outside: Outside = OUTSIDE

    def __post_init__(self) -> None:
        super().__init__("snapshot-server", self._table, self.outside)
        self._place = SocketPlace.of(self.root, self.outside)
        self._holding: set[Channel] = set()
        self.ended = self.outside.latch()

    @property
    def holders(self) -> int:
        """How many clients want this server to stay."""
        return len(self._holding)

    def start(self) -> None:
        """Listen, from now on.

        Raises:
            PermissionError: the folder of the sockets is another user's, or open to others
            OSError: the socket cannot be made
        """
        self.open(HostEndpoint(self._place, self.rank))

    def _table(self, channel: Channel, until_closed: ExitStack) -> Table:
        folders = _OpenFolders(self.kept)
        until_closed.callback(folders.close)
        until_closed.callback(self._holding.discard, channel)
        handlers: Mapping[str, Handler] = {
            "list": lambda request: {"files": self.kept.listed(request.header["path"])},
            "get": lambda request: Reply(blobs=[self.kept.get(request.header["path"], request.header["limit"])]),
            "put": self._put,
            "delete": lambda request: self.kept.delete(request.header["paths"]),
            "open": folders.open,
            "read": folders.read,
            "ranges": folders.ranges,
            "release": folders.release,
            "about": lambda _: {"about": self._all_about()},
            "hold": lambda _: self._holding.add(channel),
            "end": lambda _: self.ended.set(),
        }
        return handlers, {}

    def _put(self, request: FrameRequest) -> None:
        self.kept.put(request.header["path"], bytes(request.blob), new=request.header["new"])

    def _all_about(self) -> dict[str, Any]:
        return {
            **self.about(),
            "version": VERSION,
            "token": self._place.token,
            "rank": self.rank,
            "host": self.outside.host_name(),
            "pid": self.outside.pid(),
            "bytes": self.kept.nbytes,
            "holders": self.holders,
            "waits": [wait.plain() for wait in self.outside.waits.long()],
        }


class _OpenFolders:
    """The folders that are open for one client; left when it has gone.

    Args:
        kept: has them
    """

    def __init__(self, kept: MemoryStore | FolderStore) -> None:
        self._kept = kept
        #: The files of each, and what closes it, by the number of the request.
        self._open: dict[int, tuple[Mapping[str, LocalFile], ExitStack]] = {}

    def close(self) -> None:
        """Close all."""
        for _, until_closed in self._open.values():
            until_closed.close()

    def open(self, request: FrameRequest) -> Iterator[Reply]:
        """Open one, until it is released: the first frame says what is where, and how many descriptors come."""
        until_closed = ExitStack()
        files = until_closed.enter_context(self._kept.opened(request.header["path"]))
        self._open[request.number] = files, until_closed
        small = {name: file.tail for name, file in files.items() if not file.length}
        images = {name: file for name, file in files.items() if file.length}
        fds = list(dict.fromkeys(image.descriptor for image in images.values()))
        places = {fd: place for place, fd in enumerate(fds)}
        fds = fds if request.header.get("descriptors", True) else []
        header = {
            "number": request.number,
            "descriptors": len(fds),
            "pieces": [
                [name, places[image.descriptor], image.base, image.length, len(image.tail), image.is_replica]
                for name, image in images.items()
            ],
            "small": [[name, len(data)] for name, data in small.items()],
            "identities": {name: image.identity for name, image in images.items() if image.identity},
        }
        yield Reply(header, [*small.values(), *(image.tail for image in images.values())], fds[:_MOST_FDS])
        for start in range(_MOST_FDS, len(fds), _MOST_FDS):
            yield Reply(fds=fds[start : start + _MOST_FDS])

    def read(self, request: FrameRequest) -> Iterator[Reply]:
        """Send bytes of a file that lie before its tail, after the answer.

        Raises:
            OSError: there are fewer; if they become fewer in the meantime, the connection ends
        """
        header, channel, image = request.header, request.channel, self._image(request)
        start, end = header["offset"], header["offset"] + header["length"]
        if os.fstat(image.descriptor).st_size < image.base + end:
            raise image.cut(header["name"])
        yield Reply()
        for at in range(start, end, _SENT_BYTES):
            until, count = channel.outside.now() + _SEND_SECONDS, min(_SENT_BYTES, end - at)
            if channel.send_file(image.descriptor, image.base + at, count, until) < count:
                channel.hang_up(listens=False)
                return

    def ranges(self, request: FrameRequest) -> Reply:
        """Bytes of short ranges of a file, one after the other in an answer: between hosts, an answer is signed."""
        image, places = self._image(request), request.blob.cast("Q")
        data, position = memoryview(bytearray(sum(places[1::2]))), 0
        for offset, length in zip(places[::2], places[1::2], strict=True):
            if not image.fill(data[position : position + length], offset):
                raise image.cut(request.header["name"])
            position += length
        return Reply(blobs=[data])

    def _image(self, request: FrameRequest) -> LocalFile:
        header = request.header
        image = self._open[header["number"]][0].get(header["name"])
        if image is None or not image.length:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), header["name"])
        return image

    def release(self, request: FrameRequest) -> None:
        """Close one."""
        self._open.pop(request.header["number"])[1].close()


class FolderStore(SnapshotStore):
    """Serves a folder of this host. One in it without files has an entry of the name `FOLDER_MARK`.

    Args:
        files: the file system
        folder: the folder
        root: the path that all hosts have for it
    """

    nbytes: ClassVar[int] = 0  # of memory

    def __init__(self, files: FileStorage, folder: str, root: str) -> None:
        self._fs, self._folder, self._root, self._lock = files, folder, root, files.outside.lock()
        #: What its readers have open.
        self._open = MemoryStore(files.outside)

    def listed(self, prefix: str) -> list[ListedFile]:
        return [*self._below(self._here(prefix or self._root), prefix or self._root)]

    def _below(self, here: str, path: str) -> Iterator[ListedFile]:
        """What is at `here`, which is `path` for others. What is deleted in the meantime is not there."""
        with contextlib.suppress(FileNotFoundError):
            if not self._fs.is_real_folder(here):
                if (file := self._fs.file_at(here)) is not None:
                    yield ListedFile(path, file.size, self._fs.changed(here))
                return
            names = self._fs.names(here)
            if not names and path != self._root:
                yield ListedFile(os.path.join(path, FOLDER_MARK), 0, self._fs.changed(here))
            for name in names:
                yield from self._below(os.path.join(here, name), os.path.join(path, name))

    def get(self, path: str, limit: int) -> bytes:
        return self._fs.read(self._here(path), limit)

    def put(self, path: str, data: bytes, *, new: bool = True) -> None:
        here = self._here(path)
        if new and self._fs.exists(here):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._fs.make_folders(os.path.dirname(here))
        self._fs.write_over(here, data)

    def delete(self, paths: Sequence[str]) -> None:
        """See the base class; with the folders that are empty then. Durable at return."""
        folders = set[str]()
        for here in map(self._here, paths):
            folders.add(os.path.dirname(here))
            if os.path.basename(here) != FOLDER_MARK:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.unlink(here)
        for folder in sorted(folders, key=len, reverse=True):
            while folder != self._folder:
                remove_if_empty(self._fs, folder)
                if self._fs.exists(folder):
                    break
                folder = os.path.dirname(folder)
            with contextlib.suppress(FileNotFoundError):
                self._fs.sync_folder(folder)

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[Mapping[str, LocalFile]]:
        """See the base class. Readers share what is open."""
        here, paths = self._here(folder), list[str]()
        with ExitStack() as until_closed:
            with self._lock, ExitStack() as until_opened:
                until_opened.callback(self._open.delete, paths)
                for path in (os.path.join(here, name) for name in self._fs.names(here)):
                    if self._fs.file_at(path) is not None:
                        file = until_opened.enter_context(open(self._fs.open_to_serve(path), "rb", buffering=0))
                        size, source = os.fstat(file.fileno()).st_size, self._open.new_source()
                        self._open.put_image(path, source, file.fileno(), 0, size)
                        paths.append(path)
                files = until_closed.enter_context(self._open.opened(here))
            yield files

    def _here(self, path: str) -> str:
        """Where a path is. Raises PermissionError if it is outside of the folder."""
        if os.path.normpath(path) != path or not f"{path}/".startswith(f"{self._root}/"):
            raise PermissionError(errno.EACCES, f"not in {self._root}", path)
        return self._folder + path[len(self._root) :]


def _refuse_unknown(request: FrameRequest) -> None:
    ask = request.header["ask"]
    raise OSError(errno.EOPNOTSUPP, f"this snapshot server, of another release, does not know {ask!r:.100}")
