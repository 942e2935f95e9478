"""The keeper: a writer process that keeps the newest whole snapshot of its rank, also when its trainer has died.

It has two connections to its trainer, each with a `ByteWorker` of its own: one for files, one for memory, so that a
snapshot becomes whole in memory while an older one is being written. The frame `lane` opens the second. What is kept is
reached through a socket, by the trainers of this run and of the next one (`core/storage/memory`). `retire` drops all
snapshots but those that it names, and is answered by the arenas that other processes still read. `listen` lets keepers
and trainers of other hosts in, `replicate` has them keep copies (`copy_sender`), on a lane of its own.

When the trainers have died, rank 0's keeper decides on a snapshot that is not committed, and waits only for ranks that
may still put their part. The others release their marks, and follow its decision. A keeper that may still write
answers so (`about`): its trainer's connection is open, or frames that came on it are not handled yet.

A keeper ends when its trainer closes it, when a newer run has a snapshot of its own, or when its lease is over: so many
seconds after its trainer has died, if no run that has restored from it is connected.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

from ...errors import CheckpointError, CheckpointFencedError
from ..commit.commit import is_over
from ..outside import OUTSIDE, Outside, Thread
from ..processes.framing import Channel
from ..processes.remote_error import failed_frame
from ..processes.request_loop import FrameRequest, Handler
from ..processes.serve import ParentChannel, serve
from ..storage.memory.entrances import PeerEntrance
from ..storage.memory.host_memory import HostMemory
from ..storage.memory.keeper_server import KeeperServer
from ..storage.memory.kept_files import KeptFiles
from ..storage.memory.peer_sockets import PeerAddress
from ..storage.memory.remote_keeper import HostKeepers
from ..storage.storage import Storage
from .copy_sender import CopyResult, send_copy
from .copy_taker import CopyTaker, keeper_name
from .keep_job import Image, run_keep_job
from .orphan_commit import UndecidedSave
from .request import WriteRequest, WriteResult
from .worker import ByteWorker, MappedArena

_POLL_SECONDS = 0.1
#: Thirty years.
_FOREVER = 1e9


class SnapshotKeeper:
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
        storage: the memory of all keepers of the run on this host

    """

    def __init__(
        self, folder: str, root: str, rank: int, world_size: int, lease: float, outside: Outside = OUTSIDE
    ) -> None:
        self._outside = outside
        self.files = KeptFiles(outside)
        name = keeper_name(rank, outside)
        self._copies = CopyTaker(self.files, root, name, lambda: self._checksum_home, outside.free_memory, outside)
        self._others = HostKeepers(besides=rank, outside=outside)
        self.storage = HostMemory(self._others, own=self.files, outside=outside)
        self._root = root
        self._rank = rank
        self._lease = lease
        #: Where the package of the run's checksum is installed.
        self._checksum_home: str | None = None
        self._peers: PeerEntrance | None = None
        #: The hosts of the ranks that have sent copies, as JSON has it.
        self._homes: dict[str, str] = {}
        #: When the lease is over (in seconds of `Outside.now`), and when the trainer has died (seconds since 1970).
        self._until: float | None = None
        self._gone: float | None = None
        #: The snapshots that stay when a newer one replaces the newest.
        self._older: list[str] = []
        self._parent = outside.parent()
        self._lanes: list[Thread] = []
        #: The connections on which a snapshot may still come, or is being decided on.
        self._writing = set[KeeperWorker]()
        self._ends_soon = False
        self._fixed = {"root": folder, "memory": root, "world_size": world_size, "since": outside.date()}
        self._server = KeeperServer(self.files, root, rank, self.about, self._take_copy, outside=outside)

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
            peers = PeerEntrance(address, secret, self._outside)
            self._server.open(peers)
            self._peers = peers
        if (peers.address, peers.secret) != (address, secret):
            raise OSError(errno.EBUSY, f"this keeper listens on {peers.address} already, for others")
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
                errno.ENOTCONN, "this keeper has not been told to listen to peers, and does not know the secret"
            )
        for peer in to:
            total, more = send_copy(self.files, self._rank, path, peer, self._peers.secret, rate, deadline, outside)
            sent += more
        return CopyResult(total, sent)

    def start_lane(self, fd: int) -> None:
        """Work for the trainer on one more connection, in a thread."""
        outside = self._outside
        channel = ParentChannel(outside.adopt(fd), lambda: self._parent == outside.parent(), outside=outside)
        self._lanes.append(outside.start("ckpt-lane", self.work_for, channel))

    def work_for(self, trainer: Channel) -> None:
        """Keep the snapshots that come on a connection, until the trainer closes it or has died."""
        worker = KeeperWorker(trainer, self)
        self._writing.add(worker)
        try:
            worker.handle_frames()
        finally:
            self.writes_no_more(worker)

    def writes_no_more(self, worker: KeeperWorker) -> None:
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

        Both stay if rank 0's keeper is gone or did not decide: a restore finds out which of them all ranks have.
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
            print(f"ckpt keeper: it is unknown whether {attempt.target} is whole: {error}", file=sys.stderr)

    def still_writing(self, ranks: Collection[int]) -> set[int]:
        """Which of these ranks may still put their part of a snapshot, or decide on it: their keepers say so.

        Raises:
            OSError: a keeper does not answer
        """
        writing = set[int]()
        for keeper in self._others(self._root):
            with contextlib.suppress(ConnectionError):  # it has ended
                if keeper.rank in ranks and keeper.about().get("writing"):
                    writing.add(keeper.rank)
        return writing

    def end_soon(self) -> None:
        """Do not outlive the trainer longer than it takes to finish its saves."""
        self._ends_soon = True

    def outlive(self) -> None:
        """The trainer has died: stay until the lease is over, or another run needs nothing of this one any more."""
        self._gone = self._outside.date()
        for lane in self._lanes:
            lane.join(_FOREVER)
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


class KeeperWorker(ByteWorker):
    """A `ByteWorker` that also keeps snapshots in memory.

    Args:
        trainer: the connection
        keeper: of this process
    """

    def __init__(self, trainer: Channel, keeper: SnapshotKeeper) -> None:
        super().__init__(trainer)
        self._keeper = keeper

    def _handlers(self) -> dict[str, Handler]:
        return {
            **super()._handlers(),
            "retire": lambda request: {"held": sorted(self._keeper.retire(request.header["keep"]))},
            "listen": self._listen,
            "replicate": self._replicate,
        }

    def _notes(self) -> dict[str, Callable[[FrameRequest], None]]:
        return {**super()._notes(), "lane": lambda request: self._keeper.start_lane(request.fds[0])}

    def _listen(self, request: FrameRequest) -> dict[str, Any]:
        header = request.header
        return {"port": self._keeper.listen(header["secret"], header["address"])}

    def _replicate(self, request: FrameRequest) -> dict[str, Any]:
        header, started = request.header, perf_counter()
        to = [PeerAddress(*each) for each in header["to"]]
        copied = self._keeper.replicate(header["path"], to, header["rate"], header["seconds"])
        return {**copied._asdict(), "seconds": perf_counter() - started}

    def _storage_in(self, plain: Mapping[str, Any]) -> Storage:
        storage = self._keeper.storage
        return storage if storage.holds(plain["attempt"]["target"]) else super()._storage_in(plain)

    def _run(self, request: WriteRequest, arena: MappedArena, checksum_home: str | None) -> WriteResult:
        if request.fs is self._keeper.storage:
            return self._keeper.keep(request, arena, checksum_home)
        return super()._run(request, arena, checksum_home)

    def outlive_trainer(self, undecided: UndecidedSave) -> None:
        """See the base class; the keepers of the other ranks follow what rank 0's decides on a snapshot."""
        keeper, request = self._keeper, undecided.request
        if request.fs is not keeper.storage:
            super().outlive_trainer(undecided)
            return
        if request.rank == 0:
            undecided.finish(keeper.still_writing)
        keeper.writes_no_more(self)
        keeper.follow(undecided)


def main(outside: Outside = OUTSIDE) -> None:
    """Entry point of the process, whose job has the arguments of `SnapshotKeeper`."""
    serve(_work, on_orphan="finish", outside=outside)


def _work(job: Mapping[str, Any], trainer: Channel) -> None:
    outside = trainer.outside
    outside.leave_folder()
    keeper = SnapshotKeeper(**job, outside=outside)
    try:
        keeper.start()
    except (CheckpointError, OSError) as error:
        trainer.send(failed_frame(error, id=None))
        return
    # What reaches a process with a session of its own ends everything there is: a service, a job of Slurm.
    outside.on_signal(signal.SIGTERM, keeper.end_soon)
    try:
        if not KeeperWorker(trainer, keeper).handle_frames():
            keeper.outlive()
    finally:
        keeper.close()
