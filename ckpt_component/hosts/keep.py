"""The process that keeps and serves the newest whole snapshot of its rank in memory, also when its trainer has died.

It is the writer process of its rank, and has two connections to its trainer, each with a `ByteWorker` of its own: one
for files, one for memory, so that a snapshot becomes whole in memory while an older one is being written. The frame
`connect` opens the second. `retire` drops all snapshots but those that it names, and is answered by the arenas that
other processes still read. `listen` lets servers and trainers of other hosts in, `pull` keeps replicas of what those
have, on its own connection. Standard library only.

A snapshot is kept by reference (`run_keep_job`): a file is a range of the arena, followed by the encoded objects that
belong to it. Replicas come from the servers of other hosts (`ReplicaPull`).

When the trainers have died, rank 0's server decides on a snapshot that is not committed, and waits only for ranks that
may still put their part. The others release their marks, and follow its decision. A server that may still write
answers so (`about`): its trainer's connection is open, or frames that came on it are not handled yet.

A server ends when its trainer closes it, when a newer run has its own snapshot, or when its lease is over: so many
seconds after its trainer has died, if no run that has restored from it is connected.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import Any

from ..core.commit.commit import is_over
from ..core.outside import OUTSIDE, Outside, Thread
from ..core.processes.framing import Channel
from ..core.processes.serve import FrameRequest, Handler, ParentChannel, failed_frame, serve
from ..core.storage.checksum import Checksum, find_checksum
from ..core.storage.storage import Storage
from ..core.writing.orphan_commit import UndecidedSave
from ..core.writing.range_writer import SumCursor
from ..core.writing.request import Extent, WriteRequest, WriteResult
from ..core.writing.worker import ByteWorker, MappedArena
from ..core.writing.write_job import end_job, filled_objects, first_sums, sizes_of
from ..errors import CheckpointError, CheckpointFencedError
from .client import HostClients
from .host_memory import HostMemory
from .peer_client import ReplicaMemory, ReplicaPull
from .server import PeerEndpoint, SnapshotServer
from .stores import MemoryStore
from .wire import PeerAddress

#: Bytes to sum at a time: a call of zlib or isal without the GIL, short enough to stop after a failure.
_CHUNK_BYTES = 4 << 20


def run_keep_job(
    request: WriteRequest, files: MemoryStore, image: tuple[int, int], checksum_home: str | None = None
) -> WriteResult:
    """Keep a rank's files in memory, the integrity file last.

    Args:
        request: what to keep, and under which paths; its `source` maps the image
        files: takes the files
        image: number and descriptor of the memory of the source; must not change while a file in it is kept
        checksum_home: as for `run_write_job`

    Raises:
        OSError: a file cannot be kept, because there is no memory or descriptor left
        ChecksumMissingError: the package of the table's checksum is not installed
    """
    table, folder, started = request.table, request.attempt.staging, perf_counter()
    checksum = find_checksum(table.checksum, checksum_home)
    # Descriptors: where snapshots stay in memory, a stager shares no object of a bucket.
    sizes, shared = sizes_of(request), {each.file: int(each.held) for each in request.shared}
    sums = _sums(request, checksum)
    tails = {blob.file: bytes(data) for blob, data in filled_objects(request, checksum, sums)}
    for number, spec in enumerate(table.files):
        path, tail = os.path.join(folder, spec.name), tails.pop(spec.name, b"")
        place = (files.new_source(), shared[number], 0) if number in shared else (*image, spec.base)
        files.put_image(path, *place, spec.size, tail)
    for name, content in tails.items():
        files.put(os.path.join(folder, name), content)
    return end_job(request, sizes, sums, started, perf_counter(), request.options.io)


def _sums(request: WriteRequest, checksum: Checksum) -> list[int]:
    """The checksums of the image's items, by several threads; those of shared files are known."""
    table, sums = request.table, first_sums(request, checksum)

    def sum_extent(extent: Extent) -> None:
        base, cursor = table.files[extent.file].base, SumCursor(extent, checksum, sums)
        for start in range(extent.start, extent.end, _CHUNK_BYTES):
            end = min(start + _CHUNK_BYTES, extent.end)
            cursor.feed(request.source.buffers(base + start, base + end))

    known = {each.file for each in request.shared}
    threads = min(len(os.sched_getaffinity(0)), max(len(table.extents), 1))
    with request.fs.outside.pool(threads, "ckpt-sum") as pool:
        list(pool.map(sum_extent, (each for group in table.extents for each in group if each.file not in known)))
    return sums


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
        writing: the connections on which a snapshot may still come, or is being decided on
    """

    def __init__(
        self, folder: str, root: str, rank: int, world_size: int, lease: float, outside: Outside = OUTSIDE
    ) -> None:
        self._outside = outside
        self.files = MemoryStore(outside)
        name = f"rank {rank}'s snapshot server on {outside.host_name()}"
        self._replicas = ReplicaMemory(self.files, name, outside.free_memory, outside)
        self._others = HostClients(besides=rank, outside=outside)
        self.storage = HostMemory(self._others, own=self.files, outside=outside)
        self._root, self._lease = root, lease
        #: Where the package of the run's checksum is installed.
        self._checksum_home: str | None = None
        self._peers: PeerEndpoint | None = None
        #: The hosts of the ranks whose replicas are here, as JSON has it.
        self._homes: dict[str, str] = {}
        #: When the lease is over (in seconds of `Outside.now`), and when the trainer has died (seconds since 1970).
        self._until: float | None = None
        self._gone: float | None = None
        #: The snapshots that stay when a newer one replaces the newest.
        self._older: list[str] = []
        self._parent = outside.parent()
        self._connections: list[Thread] = []
        self.writing = set[SnapshotWorker]()
        self._ends_soon = False
        #: Set when this process ends, to end what is being pulled.
        self._closed = outside.latch()
        self._fixed = {"root": folder, "memory": root, "world_size": world_size, "since": outside.date()}
        self._server = SnapshotServer(self.files, root, rank, self.about, outside=outside)

    def start(self) -> None:
        """Answer on the socket from now on.

        Raises:
            OSError: the socket cannot be made, or is not safe
        """
        self._server.start()
        self._outside.start("ckpt-fence", self._end_with_another_run)

    def _end_with_another_run(self) -> None:
        """A newer run has its own snapshot: nothing of this one is to be found any more."""
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
            "writing": bool(self.writing),
            "peer": None if peers is None else {"address": peers.address, "port": peers.port},
            "secret": None if peers is None else peers.secret,
            "homes": self._homes,
        }

    def listen(self, secret: str, address: str) -> int:
        """Let those in who know a secret. A second call changes nothing.

        Args:
            secret: of the run
            address: an address of this host that other hosts reach

        Returns:
            The TCP port.

        Raises:
            OSError: it cannot listen there, or does so with another secret
        """
        if (peers := self._peers) is None:
            peers = PeerEndpoint(address, secret, self._outside)
            self._server.open(peers)
            self._peers = peers
        if (peers.address, peers.secret) != (address, secret):
            raise OSError(errno.EBUSY, f"this snapshot server listens on {peers.address} already, for others")
        return peers.port

    def pull(self, path: str, homes: Sequence[tuple[PeerAddress, float | None]], seconds: float) -> int:
        """Keep replicas of what other ranks have of a snapshot.

        Args:
            path: of the snapshot
            homes: their servers, and the most bytes to ask each for in a second; None: no limit
            seconds: how long it may take

        Returns:
            How many bytes of images have come, as some are here already.

        Raises:
            CheckpointFencedError: a newer run has its own snapshot
            OSError: one of them is not here; see `ReplicaPull.pull`
        """
        outside, peers = self._outside, self._peers
        self._refuse_if_replaced(path)
        if peers is None:
            text = "this snapshot server has not been told to listen to peers, and does not know the secret"
            raise OSError(errno.ENOTCONN, text)
        if not path.startswith(f"{self._root}/"):
            raise OSError(errno.EINVAL, f"it is not of the run {self._root}, so no replica of it is kept", path)
        self._homes = {**self._homes, **{str(home.rank): home.host for home, _ in homes}}
        until, secret = outside.now() + seconds, peers.secret

        def pull(home: PeerAddress, rate: float | None) -> int:
            about = secret, rate, until, self._checksum_home, outside, self._closed
            return ReplicaPull(self._replicas, home, *about).pull(path)

        with outside.pool(len(homes), "ckpt-pull") as pool:
            return sum(pool.map(pull, *zip(*homes, strict=True)))

    def start_connection(self, fd: int) -> None:
        """Work for the trainer on one more connection, in a thread."""
        outside = self._outside
        channel = ParentChannel(outside.adopt(fd), lambda: self._parent == outside.parent(), outside=outside)
        self._connections.append(outside.start("ckpt-connection", self.work_for, channel))

    def work_for(self, trainer: Channel) -> None:
        """Keep the snapshots that come on a connection, until the trainer closes it or has died."""
        worker = SnapshotWorker(trainer, self)
        self.writing.add(worker)
        try:
            worker.handle_frames()
        finally:
            self.writing.discard(worker)

    def keep(self, request: WriteRequest, arena: MappedArena, checksum_home: str | None) -> WriteResult:
        """Do a keep job.

        Raises:
            CheckpointFencedError: a newer run has its own snapshot
            OSError: see `run_keep_job`
        """
        self._refuse_if_replaced(request.attempt.target)
        self._checksum_home = checksum_home
        return run_keep_job(request, self.files, (arena.number, arena.fd), checksum_home)

    def _refuse_if_replaced(self, path: str) -> None:
        if self._server.ended.is_set:
            raise CheckpointFencedError(f"Another run has taken over; {path} is not kept in memory.")

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
        """Give up what is being pulled, and remove the socket."""
        self._closed.set()
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
            "pull": self._pull,
        }

    def _notes(self) -> dict[str, Callable[[FrameRequest], None]]:
        return {**super()._notes(), "connect": lambda request: self._client.start_connection(request.fds[0])}

    def _listen(self, request: FrameRequest) -> dict[str, Any]:
        return {"port": self._client.listen(request.header["secret"], request.header["address"])}

    def _pull(self, request: FrameRequest) -> dict[str, Any]:
        header, started = request.header, perf_counter()
        homes = [(PeerAddress(*home), rate) for home, rate in header["homes"]]
        sent = self._client.pull(header["path"], homes, header["seconds"])
        return {"sent": sent, "seconds": perf_counter() - started}

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
        client.writing.discard(self)
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
    # What reaches a process with its own session ends everything there is: a service, a job of Slurm.
    outside.on_signal(signal.SIGTERM, client.end_soon)
    try:
        if not SnapshotWorker(trainer, client).handle_frames():
            client.outlive()
    finally:
        client.close()
