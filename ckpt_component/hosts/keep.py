"""Run one keep job: checksum an image, and keep its files in memory by reference. Standard library only.

The counterpart of `write_job`, for snapshots that stay in the memory of this process. No byte of the image is copied:
a file is a range of the arena, followed by the encoded objects that belong to it.


How a server has a peer keep a copy of its files.

The bytes of an image go as they lie in memory, with `sendfile`, each file after the checksums that its keep job took.
Standard library only.

A conversation on a connection of its own: `replica` says what there is; the answer, what of it is `wanted`; then for
each of these a frame `file` and its bytes; the answer, when all is kept. A failure may be said at any time. The other
side is `copy_taker`.


How a server takes copies of other servers' files: the other side of `copy_sender`.

It puts the bytes into memory of its own, compares their checksums while they come, and keeps a copy when all of it is
right. Files that it has already, by identity, are linked. Standard library only.


The server: a writer process that keeps the newest whole snapshot of its rank, also when its trainer has died.

It has two connections to its trainer, each with a `ByteWorker` of its own: one for files, one for memory, so that a
snapshot becomes whole in memory while an older one is being written. The frame `connect` opens the second. What is kept
is reached through a socket, by the trainers of this run and of the next one. `retire` drops all snapshots but those
that it names, and is answered by the arenas that other processes still read. `listen` lets servers and trainers of
other hosts in, `replicate` has them keep copies, on a connection of its own.

When the trainers have died, rank 0's server decides on a snapshot that is not committed, and waits only for ranks that
may still put their part. The others release their marks, and follow its decision. A server that may still write
answers so (`about`): its trainer's connection is open, or frames that came on it are not handled yet.

A server ends when its trainer closes it, when a newer run has a snapshot of its own, or when its lease is over: so many
seconds after its trainer has died, if no run that has restored from it is connected.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple

from ..core.available_memory import available_bytes
from ..core.commit.commit import is_over
from ..core.lane import Lane
from ..core.memory.huge_pages import align
from ..core.outside import OUTSIDE, Outside, Thread
from ..core.processes.framing import Channel
from ..core.processes.remote_error import as_os_error, failed_frame
from ..core.processes.request_loop import FrameRequest, Handler
from ..core.processes.serve import ParentChannel, serve
from ..core.storage.checksum import Checksum, find_checksum
from ..core.storage.storage import Storage
from ..core.writing.orphan_commit import UndecidedSave
from ..core.writing.range_writer import SumCursor, Throttle
from ..core.writing.request import ReusedFile, WriteRequest, WriteResult
from ..core.writing.worker import ByteWorker, MappedArena
from ..core.writing.write_job import sizes_of, sum_objects, write_integrity
from ..core.writing.write_table import Extent, WriteTable
from ..errors import CheckpointError, CheckpointFencedError
from .client import HostClients
from .host_memory import HostMemory
from .server import PeerEndpoint, SnapshotServer
from .stores import CopyBlock, CopyMemory, FileSums, ImageRange, LocalFile, MemoryStore, OpenImage, sum_between
from .wire import PeerAddress, connect_to_peer

#: Bytes to sum at a time: a call of zlib or isal without the GIL, short enough to stop after a failure.
_CHUNK_BYTES = 4 << 20


class Image(NamedTuple):
    """The memory that holds an image: its number, and its descriptor."""

    number: int
    descriptor: int


def run_keep_job(
    request: WriteRequest, files: MemoryStore, image: Image, checksum_home: str | None = None
) -> WriteResult:
    """Keep a rank's files in memory, the integrity file last.

    Args:
        request: what to keep, and under which paths; its `source` maps the image
        files: takes the files
        image: the memory of the source; must not change while a file in it is kept
        checksum_home: as for `run_write_job`

    Raises:
        OSError: a file cannot be kept, because there is no memory or descriptor left
        ChecksumMissingError: the package of the table's checksum is not installed
    """
    table, folder, started = request.table, request.attempt.staging, perf_counter()
    checksum = find_checksum(table.checksum, checksum_home)
    sizes, shared = sizes_of(request), {each.file: each for each in request.shared}
    sums = _sums(request, checksum)
    tails = dict[str, bytes]()
    for blob in request.object_blobs:
        data = blob.filled(sums)
        tails[blob.file] = bytes(data)
        sums += sum_objects(blob, data, checksum)
    for number, spec in enumerate(table.files):
        path, tail = os.path.join(folder, spec.name), tails.pop(spec.name, b"")
        known = _sums_of(table, number, sums)
        if number in shared:
            files.put_image(path, files.new_source(), _descriptor(shared[number]), 0, spec.size, sums=known)
        else:
            files.put_image(path, image.number, image.descriptor, spec.base, spec.size, tail, known)
    for name, content in tails.items():
        files.put(os.path.join(folder, name), content)
    summed_at = perf_counter()
    listed = write_integrity(request, sizes, sums)
    return {
        "rank": request.rank,
        "files": listed,
        "bytes": sum(entry["size"] for entry in listed),
        "seconds": perf_counter() - started,
        "began": started,
        "synced_from": summed_at,
        "io": request.options.io,
        "sums": [],
        "shared": 0,
        "copied": [],
    }


def _descriptor(shared: ReusedFile) -> int:
    if isinstance(shared.held, str):  # of a bucket; the stager takes none where snapshots stay in memory
        raise TypeError(f"{shared.held} is not open, so it cannot be kept in memory")
    return shared.held


def _sums_of(table: WriteTable, file: int, sums: Sequence[int]) -> FileSums:
    """The checksums of a file of the table."""
    places, values = array("Q"), array("Q")
    for extent in sorted(
        (extent for group in table.extents for extent in group if extent.file == file), key=attrgetter("start")
    ):
        places.frombytes(extent.places.cast("B"))
        values.extend(sums[extent.first : extent.first + len(extent.places) // 2])
    return FileSums(table.checksum, places, values)


def _sums(request: WriteRequest, checksum: Checksum) -> list[int]:
    """The checksums of the image's items, by several threads; those of shared files are known."""
    table = request.table
    sums = [checksum.of(memoryview(b""))] * table.item_count  # for items without bytes
    for each in request.shared:
        for number, value in zip(table.items_of(each.file), each.sums, strict=True):
            sums[number] = value
    known = {each.file for each in request.shared}

    def sum_extents(extents: Sequence[Extent]) -> None:
        for extent in extents:
            if extent.file in known:
                continue
            base, cursor = table.files[extent.file].base, SumCursor(extent, checksum, sums)
            for start in range(extent.start, extent.end, _CHUNK_BYTES):
                end = min(start + _CHUNK_BYTES, extent.end)
                cursor.feed(request.source.buffers(base + start, base + end))

    threads = min(len(os.sched_getaffinity(0)), max(len(table.extents), 1))
    with request.fs.outside.pool(threads, "ckpt-sum") as pool:
        list(pool.map(sum_extents, table.extents))
    return sums


_CONNECT_SECONDS = 10.0
#: Bytes to send at once, unless their rate is limited.
_PIECE_BYTES = 4 << 20
_LEAST_PIECE_BYTES = 64 << 10
_READ_BYTES = 1 << 20


class CopyResult(NamedTuple):
    """What a copy was.

    Attributes:
        bytes: size of all files
        sent: bytes of images that were sent, not linked
    """

    bytes: int
    sent: int


def send_copy(
    files: MemoryStore,
    rank: int,
    path: str,
    to: PeerAddress,
    secret: str,
    bytes_per_second: float | None,
    deadline: float,
    outside: Outside = OUTSIDE,
) -> CopyResult:
    """Have a peer keep what this server has of a snapshot. Returns when the peer has all of it, and it is right.

    Args:
        files: of this server
        rank: this server's
        path: of the snapshot
        to: the peer
        secret: of the run
        bytes_per_second: most bytes to send in a second; None: no limit
        deadline: in seconds of `Outside.now`
        outside: of this process

    Raises:
        FileNotFoundError: nothing of the snapshot is here
        PermissionError: the peer belongs to another run
        TimeoutError: the peer did not take it in time
        OSError: it could not be sent, or the peer has refused it
    """
    with files.opened_to_copy(path) as own:
        if not own:
            raise FileNotFoundError(
                errno.ENOENT, "nothing of it is in this snapshot server, so it cannot be copied", path
            )
        images = [
            (name, modified, content) for name, (content, modified) in own.items() if isinstance(content, OpenImage)
        ]
        small = [(name, modified, content) for name, (content, modified) in own.items() if isinstance(content, bytes)]
        header = {
            "ask": "replica",
            "rank": rank,
            "host": outside.host_name(),
            "path": path,
            "seconds": deadline - outside.now(),
            "small": [[name, modified, len(content)] for name, modified, content in small],
            "images": [
                [name, modified, image.piece.length, len(image.piece.tail), image.same]
                for name, modified, image in images
            ],
        }
        blobs = [*(content for *_, content in small), *(image.piece.tail for *_, image in images)]
        channel = connect_to_peer(to, secret, min(_CONNECT_SECONDS, max(deadline - outside.now(), 0.001)), outside)
        with contextlib.closing(channel):
            sender = _Sender(channel, to, bytes_per_second, deadline)
            wanted = sender.ask(header, blobs)["wanted"]
            for number in wanted:
                name, _, image = images[number]
                sender.send_image(name, image)
            sender.answer()
    total = sum(map(len, blobs)) + sum(image.piece.length for *_, image in images)
    return CopyResult(total, sum(images[number][2].piece.length for number in wanted))


class _Sender:
    """The side of a conversation that sends.

    Args:
        channel: the connection
        to: the peer
        bytes_per_second: limits the rate
        deadline: in seconds of `Outside.now`
    """

    def __init__(self, channel: Channel, to: PeerAddress, bytes_per_second: float | None, deadline: float) -> None:
        self._channel = channel
        self._to = to
        self._deadline = deadline
        self._throttle = Throttle(bytes_per_second)
        self._rate = math.inf if bytes_per_second is None else bytes_per_second
        #: At a limited rate, those of a tenth of a second, so that they come steadily.
        self._piece_bytes = int(max(min(self._rate / 10, _PIECE_BYTES), _LEAST_PIECE_BYTES))

    def ask(self, header: Mapping[str, Any], blobs: Sequence[bytes]) -> dict[str, Any]:
        """Send a frame; returns its answer."""
        with self._sending():
            self._channel.send(header, self._deadline, blobs)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next answer; raises what it tells of."""
        try:
            frame = self._channel.receive(self._deadline)
        except TimeoutError as error:
            raise self._late() from error
        if frame is None:
            raise ConnectionResetError(errno.ECONNRESET, f"{self._to} has hung up")
        if frame[0]["kind"] != "done":
            raise as_os_error(frame[0])
        return frame[0]

    def send_image(self, name: str, image: OpenImage) -> None:
        """Send a file, without its tail, which is there."""
        piece, sums = image.piece, image.sums or FileSums("", array("Q"), array("Q"))
        others = sum_between(sums.places, piece.length, partial(_pread, piece))
        header = {"ask": "file", "algorithm": sums.algorithm, "others": others}
        with self._sending():
            self._channel.send(header, self._deadline, [sums.places.tobytes(), sums.values.tobytes()])
        for start in range(0, piece.length, self._piece_bytes):
            if self._channel.has_input:
                self.answer()  # it was refused
                raise OSError(errno.EPROTO, f"{self._to} has answered before it had all bytes", name)
            count = min(self._piece_bytes, piece.length - start)
            if self._rate * max(self._deadline - self._channel.outside.now(), 0) < count:
                raise self._late()
            self._throttle.wait(count)
            with self._sending():
                sent = self._channel.send_file(piece.descriptor, piece.base + start, count, self._deadline)
            if sent < count:
                raise OSError(errno.EIO, f"its memory ends after {start + sent} of {piece.length} bytes", name)

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        """Errors in words; if the peer has hung up, those that it said last."""
        try:
            yield
        except TimeoutError as error:
            raise self._late() from error
        except ConnectionError as error:
            self.answer()
            raise ConnectionResetError(errno.ECONNRESET, f"{self._to} has hung up") from error

    def _late(self) -> TimeoutError:
        return TimeoutError(errno.ETIMEDOUT, f"{self._to} has not taken the copy in time; it is stopped, or too slow")


def _pread(piece: LocalFile, start: int, end: int) -> Iterator[bytes]:
    while start < end:
        data = os.pread(piece.descriptor, min(end - start, _READ_BYTES), piece.base + start)
        if not data:
            return  # as sending it will say
        yield data
        start += len(data)


#: How long a copy's next bytes may take, and the end of a connection over which one was refused.
_STALL_SECONDS = 10.0
#: Bytes to receive and sum at once, which fit into a processor's cache.
_TAKEN_BYTES = 1 << 20
_DISCARDED_BYTES = 1 << 20


class CopyTaker:
    """Takes copies that other servers of the run send. Thread-safe.

    Args:
        files: of this server
        root: of the run's memory
        name: of this server, for errors
        checksum_home: returns where the package of the run's checksum is installed
        available: returns how many bytes of memory are free
        outside: of this server
    """

    def __init__(
        self,
        files: MemoryStore,
        root: str,
        name: str,
        checksum_home: Callable[[], str | None],
        available: Callable[[], int] = available_bytes,
        outside: Outside = OUTSIDE,
    ) -> None:
        self._outside = outside
        self._files = files
        self._root = root
        self._name = name
        self._checksum_home = checksum_home
        self._memory = CopyMemory(files, name, available, outside)

    def take(self, channel: Channel, header: Mapping[str, Any], blob: memoryview) -> Iterator[dict[str, Any]]:
        """Take a copy: the answers to the frame `replica`.

        Args:
            channel: to who sends it
            header: of the frame
            blob: small files and tails

        Raises:
            OSError: it is not taken
        """
        try:
            yield from self._taken(channel, header, blob)
        except Exception as error:
            # Said now, as who sends looks for it; what is on its way would hide it if the connection ended at once.
            channel.send(failed_frame(error, traced=False), self._outside.now() + _STALL_SECONDS)
            _discard(channel, self._outside.now() + _STALL_SECONDS)
            raise ConnectionResetError(errno.ECONNRESET, "a copy was refused") from error

    def _taken(self, channel: Channel, header: Mapping[str, Any], blob: memoryview) -> Iterator[dict[str, Any]]:
        home, folder, images = header["rank"], header["path"], header["images"]
        until = self._outside.now() + header["seconds"]
        if not folder.startswith(f"{self._root}/"):
            raise OSError(
                errno.EINVAL, f"{self._name} is of the run {self._root}, and takes no copies of others", folder
            )
        contents = dict[str, tuple[ImageRange | bytes, float]]()
        position = 0
        for path, modified, size in header["small"]:
            contents[path] = bytes(blob[position : position + size]), modified
            position += size
        tails = list[bytes]()
        for *_, size, _ in images:
            tails.append(bytes(blob[position : position + size]))
            position += size
        # A file with the same path is of the same attempt, and was sent before.
        candidates = {path: (length, [*same, path]) for path, _, length, _, same in images}
        with self._files.linked(home, candidates) as linked:
            wanted = list[int]()
            for number, (path, modified, *_) in enumerate(images):
                if path in linked:
                    contents[path] = linked[path]._replace(tail=tails[number]), modified
                else:
                    wanted.append(number)
            if wanted:
                with self._memory.block(home, sum(align(images[number][2]) for number in wanted)) as block:
                    yield {"wanted": wanted}
                    base = 0
                    for number in wanted:
                        path, modified, length, *_ = images[number]
                        self._receive(channel, block, base, length, path, until)
                        contents[path] = ImageRange(block.source, base, length, tails[number]), modified
                        base += align(length)
                    self._files.put_replica(home, folder, contents, (block.source, block.fd))
            else:
                yield {"wanted": wanted}
                self._files.put_replica(home, folder, contents)
        yield {}

    def _receive(self, channel: Channel, block: CopyBlock, base: int, length: int, path: str, until: float) -> None:
        """Receive the bytes of a file into a block, and compare their checksums."""
        try:
            frame = channel.receive(min(until, self._outside.now() + _STALL_SECONDS))
        except TimeoutError as error:
            raise _late(path, until, self._outside) from error
        if frame is None:
            raise _hung_up()
        header, blob, _ = frame
        numbers = array("Q")
        numbers.frombytes(blob)
        places, right = numbers[: len(numbers) * 2 // 3], numbers[len(numbers) * 2 // 3 :]
        checksum = find_checksum(header["algorithm"] or "crc32", self._checksum_home())
        found = [checksum.of(memoryview(b""))] * len(right)
        cursor = SumCursor(Extent(0, 0, length, 0, memoryview(places)), checksum, found)
        incoming = _IncomingFile(channel, block, (base, base + length), path, until, cursor)
        helper = Lane("ckpt-copy", self._outside)
        try:
            other = helper.submit(incoming.work)
            incoming.work()
        finally:
            helper.close(self._outside.now() + _STALL_SECONDS)
        if not self._outside.wait_for([other], 0):
            raise _late(path, until, self._outside)
        other.result(0)
        for number, value in enumerate(right):
            if found[number] != value:
                raise self._damaged(path, f"the item at byte {places[2 * number]}")
        memory = block.part(base, base + length, until)
        if sum_between(places, length, lambda start, end: iter([memory[start:end]])) != header["others"]:
            raise self._damaged(path, "what lies between its items")

    def _damaged(self, path: str, what: str) -> OSError:
        text = f"{what} was damaged on its way to {self._name}: the bytes do not match their checksum"
        return OSError(errno.EBADMSG, text, path)


class _IncomingFile:
    """The bytes of a file, which two threads receive and sum in turn: each sums its piece while the other receives.

    So a piece is summed by the processor that has it in its cache, and no thread waits for the other one to wake up.

    Args:
        channel: to who sends them
        block: where they go
        place: start and end there
        path: of the file, for errors
        until: when they must be here, in seconds of `Outside.now`
        cursor: sums them
    """

    def __init__(
        self, channel: Channel, block: CopyBlock, place: tuple[int, int], path: str, until: float, cursor: SumCursor
    ) -> None:
        self._channel, self._block, self._path, self._until, self._cursor = channel, block, path, until, cursor
        start, self._end = place
        self._starts = deque(range(start, self._end, _TAKEN_BYTES))
        outside = self._outside = channel.outside
        self._receiving, self._summed, self._is_summing = outside.lock(), outside.condition(), False

    def work(self) -> None:
        """Receive and sum, in turn with another thread, until nothing is left; raises OSError."""
        while (piece := self._next()) is not None:
            try:
                self._cursor.feed([piece])
            finally:
                with self._summed:
                    self._is_summing = False
                    self._summed.notify_all()

    def _next(self) -> memoryview | None:
        """Receive the next piece, and keep others from summing theirs before it; None: there is none."""
        with self._receiving:
            if not self._starts:
                return None
            try:
                return self._receive(self._starts.popleft())
            except OSError:
                self._starts.clear()  # the other thread is to end too
                raise

    def _receive(self, start: int) -> memoryview:
        try:
            piece = self._block.part(start, min(start + _TAKEN_BYTES, self._end), self._until)
            is_there = self._channel.receive_into(piece, self._until)
            if is_there:
                with self._summed:
                    if not self._summed.wait_for(lambda: not self._is_summing, _STALL_SECONDS):
                        raise TimeoutError
                    self._is_summing = True
        except TimeoutError as error:
            raise _late(self._path, self._until, self._outside) from error
        if not is_there:
            raise _hung_up()
        return piece


def _late(path: str, until: float, outside: Outside) -> TimeoutError:
    why = "it was not here in time" if outside.now() > until else f"nothing more came for {_STALL_SECONDS:g} s"
    return TimeoutError(errno.ETIMEDOUT, why, path)


def _hung_up() -> ConnectionError:
    return ConnectionResetError(errno.ECONNRESET, "who sent a copy has hung up")


def server_name(rank: int, outside: Outside = OUTSIDE) -> str:
    """What a server of this host is called on other hosts."""
    return f"rank {rank}'s snapshot server on {outside.host_name()}"


def _discard(channel: Channel, until: float) -> None:
    """Receive and forget what is on its way, until the other side hangs up."""
    buffer = memoryview(bytearray(_DISCARDED_BYTES))
    with contextlib.suppress(OSError):  # it hung up, or sends no more
        while channel.outside.now() < until and channel.receive_into(buffer, until):
            pass


_POLL_SECONDS = 0.1
#: Thirty years.
_FOREVER = 1e9


class SnapshotProcess:
    """What this process keeps, and for how long.

    Args:
        folder: the run's folder of checkpoints, or the URL of one
        root: the run's root in memory
        rank: the rank of the trainer
        world_size: number of ranks
        lease: seconds that it stays after its trainer has died
        outside: of this process

    Attributes:
        files: what is kept
        storage: the memory of all servers of the run on this host

    """

    def __init__(
        self, folder: str, root: str, rank: int, world_size: int, lease: float, outside: Outside = OUTSIDE
    ) -> None:
        self._outside = outside
        self.files = MemoryStore(outside)
        name = server_name(rank, outside)
        self._copies = CopyTaker(self.files, root, name, lambda: self._checksum_home, outside.free_memory, outside)
        self._others = HostClients(besides=rank, outside=outside)
        self.storage = HostMemory(self._others, own=self.files, outside=outside)
        self._root = root
        self._rank = rank
        self._lease = lease
        #: Where the package of the run's checksum is installed.
        self._checksum_home: str | None = None
        self._peers: PeerEndpoint | None = None
        #: The hosts of the ranks that have sent copies, as JSON has it.
        self._homes: dict[str, str] = {}
        #: When the lease is over (in seconds of `Outside.now`), and when the trainer has died (seconds since 1970).
        self._until: float | None = None
        self._gone: float | None = None
        #: The snapshots that stay when a newer one replaces the newest.
        self._older: list[str] = []
        self._parent = outside.parent()
        self._connections: list[Thread] = []
        #: The connections on which a snapshot may still come, or is being decided on.
        self._writing = set[SnapshotWorker]()
        self._ends_soon = False
        self._fixed = {"root": folder, "memory": root, "world_size": world_size, "since": outside.date()}
        self._server = SnapshotServer(self.files, root, rank, self.about, self._take_copy, outside=outside)

    def start(self) -> None:
        """Answer on the socket from now on.

        Raises:
            OSError: the socket cannot be made, or is not safe
        """
        self._server.start()
        self._outside.start("ckpt-fence", self._end_with_another_run)

    def _end_with_another_run(self) -> None:
        """A newer run has a snapshot of its own: nothing of this one is to be found any more."""
        self._server.ended.wait(_FOREVER)
        self.files.delete([file.path for file in self.files.listed("")])

    def about(self) -> dict[str, Any]:
        """Who this is, how long it stays, and how other hosts reach it, as JSON values."""
        peers = self._peers
        left = self._lease if self._until is None else max(self._until - self._outside.now(), 0.0)
        return {
            **self._fixed,
            "lease": left,
            "alive": self._gone is None,
            "gone": self._gone,
            "writing": bool(self._writing),
            "peer": None if peers is None else {"address": peers.address, "port": peers.port},
            "secret": None if peers is None else peers.secret,
            "homes": self._homes,
        }

    def listen(self, secret: str, address: str) -> int:
        """Let those in who know a secret, and keep copies of their files. A second call changes nothing.

        Args:
            secret: of the run
            address: an address of this host that other hosts reach

        Returns:
            The TCP port.

        Raises:
            OSError: it cannot listen there, or does so with another secret
        """
        peers = self._peers
        if peers is None:
            peers = PeerEndpoint(address, secret, self._outside)
            self._server.open(peers)
            self._peers = peers
        if (peers.address, peers.secret) != (address, secret):
            raise OSError(errno.EBUSY, f"this snapshot server listens on {peers.address} already, for others")
        return peers.port

    def replicate(self, path: str, to: Sequence[PeerAddress], rate: float | None, seconds: float) -> CopyResult:
        """Have peers keep what this rank has of a snapshot, one after the other.

        Args:
            path: of the snapshot
            to: the peers
            rate: most bytes to send in a second; None: no limit
            seconds: how long it may take

        Raises:
            OSError: one of them does not have it; see `send_copy`
        """
        outside = self._outside
        deadline, total, sent = outside.now() + seconds, 0, 0
        if self._peers is None:
            raise OSError(
                errno.ENOTCONN,
                "this snapshot server has not been told to listen to peers, and does not know the secret",
            )
        for peer in to:
            total, more = send_copy(self.files, self._rank, path, peer, self._peers.secret, rate, deadline, outside)
            sent += more
        return CopyResult(total, sent)

    def start_connection(self, fd: int) -> None:
        """Work for the trainer on one more connection, in a thread."""
        outside = self._outside
        channel = ParentChannel(outside.adopt(fd), lambda: self._parent == outside.parent(), outside=outside)
        self._connections.append(outside.start("ckpt-connection", self.work_for, channel))

    def work_for(self, trainer: Channel) -> None:
        """Keep the snapshots that come on a connection, until the trainer closes it or has died."""
        worker = SnapshotWorker(trainer, self)
        self._writing.add(worker)
        try:
            worker.handle_frames()
        finally:
            self.writes_no_more(worker)

    def writes_no_more(self, worker: SnapshotWorker) -> None:
        """No snapshot comes on the connection of a worker any more, and it decides on none. Safe to call twice."""
        self._writing.discard(worker)

    def keep(self, request: WriteRequest, arena: MappedArena, checksum_home: str | None) -> WriteResult:
        """Do a keep job.

        Raises:
            CheckpointFencedError: a newer run has a snapshot of its own
            OSError: see `run_keep_job`
        """
        if self._server.ended.is_set:
            raise CheckpointFencedError(f"Another run has taken over; {request.attempt.target} is not kept in memory.")
        self._checksum_home = checksum_home
        return run_keep_job(request, self.files, Image(arena.number, arena.fd), checksum_home)

    def _take_copy(self, channel: Channel, header: Mapping[str, Any], blob: memoryview) -> Iterator[dict[str, Any]]:
        """Take a copy of a peer's files, unless a newer run has a snapshot of its own; see `CopyTaker.take`."""
        if self._server.ended.is_set:
            raise CheckpointFencedError(f"Another run has taken over; {header['path']} is not kept in memory.")
        self._homes[str(header["rank"])] = header["host"]
        yield from self._copies.take(channel, header, blob)

    def retire(self, keep: Sequence[str]) -> set[int]:
        """Drop all snapshots but those of these paths, the newest last; returns the arenas that others read."""
        self._older = [*keep[:-1]]
        paths, stay = [file.path for file in self.files.listed(self._root)], tuple(f"{path}/" for path in keep)
        # What lies in the root itself marks an attempt as alive.
        self.files.delete([file for file in paths if os.path.dirname(file) != self._root and not file.startswith(stay)])
        return self.files.held()

    def follow(self, undecided: UndecidedSave) -> None:
        """The trainer has died: drop what the save replaces, or the save itself, once rank 0 has decided which stays.

        Both stay if rank 0's server is gone or did not decide: a restore finds out which of them all ranks have.
        """
        attempt, outside = undecided.request.attempt, self.storage.outside
        try:
            undecided.lock.close()  # a lock is for those who write or decide
            with outside.waits.on(f"rank 0's decision on {attempt.target}", undecided.until) as wait:
                while self.still_writing({0}) and not is_over(attempt):
                    if outside.now() > undecided.until:
                        return
                    wait.look()
                    outside.sleep(_POLL_SECONDS)
            if is_over(attempt) and attempt.protocol.is_committed(attempt):
                self.retire([*self._older, attempt.target])
        except (CheckpointError, OSError) as error:
            print(f"ckpt snapshot server: it is unknown whether {attempt.target} is whole: {error}", file=sys.stderr)

    def still_writing(self, ranks: Collection[int]) -> set[int]:
        """Which of these ranks may still put their part of a snapshot, or decide on it: their servers say so.

        Raises:
            OSError: a server does not answer
        """
        writing = set[int]()
        for client in self._others(self._root):
            with contextlib.suppress(ConnectionError):  # it has ended
                if client.rank in ranks and client.about().get("writing"):
                    writing.add(client.rank)
        return writing

    def end_soon(self) -> None:
        """Do not outlive the trainer longer than it takes to finish its saves."""
        self._ends_soon = True

    def outlive(self) -> None:
        """The trainer has died: stay until the lease is over, or another run needs nothing of this one any more."""
        self._gone = self._outside.date()
        for connection in self._connections:
            connection.join(_FOREVER)
        self._until = self._outside.now() + self._lease
        self._outside.be_silent()
        while self.files.nbytes and not (self._ends_soon or self._server.ended.wait(_POLL_SECONDS)):
            now = self._outside.now()
            if self._server.holders:
                self._until = now + self._lease
            elif now > self._until:
                return

    def close(self) -> None:
        """Remove the socket."""
        self._server.close()


class SnapshotWorker(ByteWorker):
    """A `ByteWorker` that also keeps snapshots in memory.

    Args:
        trainer: the connection
        server: of this process
    """

    def __init__(self, trainer: Channel, client: SnapshotProcess) -> None:
        super().__init__(trainer)
        self._client = client

    def _handlers(self) -> dict[str, Handler]:
        return {
            **super()._handlers(),
            "retire": lambda request: {"held": sorted(self._client.retire(request.header["keep"]))},
            "listen": self._listen,
            "replicate": self._replicate,
        }

    def _notes(self) -> dict[str, Callable[[FrameRequest], None]]:
        return {**super()._notes(), "connect": lambda request: self._client.start_connection(request.fds[0])}

    def _listen(self, request: FrameRequest) -> dict[str, Any]:
        header = request.header
        return {"port": self._client.listen(header["secret"], header["address"])}

    def _replicate(self, request: FrameRequest) -> dict[str, Any]:
        header, started = request.header, perf_counter()
        to = [PeerAddress(*each) for each in header["to"]]
        copied = self._client.replicate(header["path"], to, header["rate"], header["seconds"])
        return {**copied._asdict(), "seconds": perf_counter() - started}

    def _storage_in(self, plain: Mapping[str, Any]) -> Storage:
        storage = self._client.storage
        return storage if storage.holds(plain["attempt"]["target"]) else super()._storage_in(plain)

    def _run(self, request: WriteRequest, arena: MappedArena, checksum_home: str | None) -> WriteResult:
        if request.fs is self._client.storage:
            return self._client.keep(request, arena, checksum_home)
        return super()._run(request, arena, checksum_home)

    def outlive_trainer(self, undecided: UndecidedSave) -> None:
        """See the base class; the servers of the other ranks follow what rank 0's decides on a snapshot."""
        client, request = self._client, undecided.request
        if request.fs is not client.storage:
            super().outlive_trainer(undecided)
            return
        if request.rank == 0:
            undecided.finish(client.still_writing)
        client.writes_no_more(self)
        client.follow(undecided)


def main(outside: Outside = OUTSIDE) -> None:
    """Entry point of the process, whose job has the arguments of `SnapshotProcess`."""
    serve(_work, on_orphan="finish", outside=outside)


def _work(job: Mapping[str, Any], trainer: Channel) -> None:
    outside = trainer.outside
    outside.leave_folder()
    client = SnapshotProcess(**job, outside=outside)
    try:
        client.start()
    except (CheckpointError, OSError) as error:
        trainer.send(failed_frame(error, id=None))
        return
    # What reaches a process with a session of its own ends everything there is: a service, a job of Slurm.
    outside.on_signal(signal.SIGTERM, client.end_soon)
    try:
        if not SnapshotWorker(trainer, client).handle_frames():
            client.outlive()
    finally:
        client.close()
