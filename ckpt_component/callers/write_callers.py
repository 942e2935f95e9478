"""Callers run write requests: in the trainer, in a process per save, or in one process for the whole run.

`MemoryCaller` runs those whose target is in memory. The process is the torch-free writer. Tables and arena descriptors
are constant and sent once per process; a save is then a frame of a few hundred bytes and the encoded objects.
"""

from __future__ import annotations

import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, ClassVar

import psutil

from ..core.image.arena import Arena
from ..core.options import NICE, IoPriority, PageCache
from ..core.outside import OUTSIDE, Outside
from ..core.processes.serve import as_local_error
from ..core.spelling import member
from ..core.storage.checksum import home_of
from ..core.storage.locate import same_folder
from ..core.writing.process import ByteProcess, WriterConnection, WriterProgram
from ..core.writing.request import WriteRequest
from ..core.writing.write_job import run_write_job
from ..errors import CheckpointSaveError, CheckpointTimeoutError, CheckpointTypeError, RemoteTraceback, WorkerDiedError

logger = logging.getLogger(__name__)


class WriteCaller(ABC):
    """Decides which process runs a write request."""

    #: Whether another process writes, so that the image must be visible to it.
    in_other_process: ClassVar[bool]
    #: What it runs in, by which deadlines are; the checkpointer sets that of its ranks, before `prepare`.
    outside: Outside = OUTSIDE

    def prepare(self, timeout: float) -> None:
        """Start the writer process, if it can be started before the first save.

        Args:
            timeout: seconds within which the process must be ready

        Raises:
            CheckpointTimeoutError, WorkerDiedError: the writer process did not start
        """

    @abstractmethod
    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        """Run one request before `deadline` (`Outside.now`). Called by one thread at a time.

        Returns:
            What was written: a `WriteResult`.

        Raises:
            CheckpointSaveError: the write failed; the caller can still run further requests
            CheckpointTimeoutError: the deadline passed; the process that hung was killed
        """

    def progress(self) -> int:
        """Bytes written by the writing process since it started; shows other ranks whether it is slow or hung."""
        return _written_by(os.getpid())

    def settle(self) -> None:
        """Called when the save of the last request was committed or given up."""

    def close(self, timeout: float = 60.0) -> None:
        """Stop the process, by SIGKILL after `timeout` seconds. Safe to call twice."""


class InlineCaller(WriteCaller):
    """Writes in the trainer, while training waits."""

    in_other_process: ClassVar[bool] = False

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        """Write with as many threads as the writer has workers. The deadline cannot interrupt a system call."""
        try:
            return run_write_job(request)
        except OSError as error:
            raise CheckpointSaveError(f"Writing {request.attempt.target} failed: {error}.", error.errno) from error


class ConnectedCaller(WriteCaller):
    """Base of the background callers: a connection to the process, and what was sent on it already."""

    in_other_process: ClassVar[bool] = True
    _keeps_cached = False

    def __init__(self) -> None:
        self._process: WriterConnection | None = None
        self._numbers = itertools.count()
        self._arenas: dict[int, Arena] = {}
        #: The last table sent to the process: its number, and its sidecars.
        self._sent_table: tuple[int, Mapping[str, bytes] | None] | None = None
        self._unsettled: WriteRequest | None = None

    @property
    def pid(self) -> int | None:
        """The id of the writer process, or None if none is running."""
        process = self._process  # the save thread may drop it concurrently
        return process.pid if process is not None and process.alive else None

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        """Send the request to the process, starting one if necessary, and wait for the answer."""
        process = self._running(request.timeouts.worker_start)
        number = next(self._numbers)
        self._unsettled = request
        try:
            self._send(process, request, number, deadline)
            answer = process.receive(deadline, "timeouts.write")
        except WorkerDiedError:
            self._kill(process)
            raise
        except CheckpointTimeoutError as error:
            open_files = _open_files(process.pid, request.attempt.staging)
            self._kill(process)
            raise CheckpointTimeoutError(
                f"Rank {request.rank}'s part of {request.attempt.target} was not written in time; {open_files}. {error}"
            ) from error
        matches = answer["kind"] in ("done", "failed") and answer["id"] == number
        if not matches:
            self._kill(process)
        if answer["kind"] == "failed":
            raise CheckpointSaveError(
                f"Writing {request.attempt.target} failed in the writer process (pid {process.pid}): "
                f"{answer['error']}.",
                answer["errno"],
            ) from RemoteTraceback(answer["traceback"])
        if not matches:
            raise CheckpointSaveError(
                f"Writing {request.attempt.target} failed: the writer process (pid {process.pid}) answered request "
                f"{number} with a frame {answer['kind']!r} for request {answer.get('id')}."
            )
        return dict(answer["result"])

    def progress(self) -> int:
        """Bytes written by the writer process; see `WriteCaller.progress`."""
        pid = self.pid
        return 0 if pid is None else _written_by(pid)

    def settle(self) -> None:
        """Make the process forget the save, which it would otherwise commit if the trainer died."""
        request, self._unsettled = self._unsettled, None
        process = self._process
        if request is None or process is None or not process.alive:
            return
        try:
            process.send({"kind": "decided"}, self.outside.now() + request.timeouts.close)
        except (WorkerDiedError, CheckpointTimeoutError) as error:
            # The save itself is over; the next one starts a new process.
            logger.warning("%s", error)
            self._kill(process)

    @abstractmethod
    def _connect(self, timeout: float) -> WriterConnection:
        """A connection to a running process, a new one where there is none, or it has ended."""

    def _running(self, timeout: float) -> WriterConnection:
        process = self._process
        if process is None or not process.alive:
            self._arenas, self._sent_table = {}, None
            self._process = process = self._connect(timeout)
        return process

    def _kill(self, process: WriterConnection) -> None:
        process.kill()
        self._process = None

    def _send(self, process: WriterConnection, request: WriteRequest, number: int, deadline: float) -> None:
        """Send the arena's descriptor and the table, unless the process has them, and the request itself."""
        arena, sidecars = request.source, request.sidecars or {}
        if not isinstance(arena, Arena):
            kind = type(arena).__name__
            raise CheckpointTypeError(f"The stager's source is a {kind} and no Arena; use checkpoint/caller=inline.")
        if arena.number not in self._arenas:
            retired = [each for each, sent in self._arenas.items() if sent.closed]
            header = {"kind": "arena", "id": arena.number, "size": arena.nbytes, "retired": retired}
            process.send(header, deadline, fds=[arena.shared_descriptor()])
            self._arenas = {each: sent for each, sent in self._arenas.items() if not sent.closed}
            self._arenas[arena.number] = arena
        if self._sent_table != (request.table.number, request.sidecars):
            plain, parts = request.table.to_parts()
            header = {
                "kind": "table",
                "table": plain,
                "sidecars": [(name, len(data)) for name, data in sidecars.items()],
                # The process runs without site-packages, where the checksum's package is installed.
                "checksum_home": home_of(request.table.checksum),
            }
            process.send(header, deadline, blobs=[*parts, *sidecars.values()])
            self._sent_table = (request.table.number, request.sidecars)
        plain, blobs = request.to_parts()
        header = {
            "kind": "write",
            "id": number,
            "arena": arena.number,
            "table": request.table.number,
            "keeps_cached": self._keeps_cached,
            "seconds": max(deadline - self.outside.now(), 0.0),
            "request": plain,
        }
        process.send(
            header, deadline, blobs=blobs, fds=[each.held for each in request.shared if isinstance(each.held, int)]
        )


class _WriterProcessCaller(ConnectedCaller):
    """Base of the callers that own a process."""

    #: Whether `close` lets it live on.
    _outlives = False

    def __init__(self, nice: int = 10, io_priority: IoPriority = IoPriority.low) -> None:
        NICE.check("checkpoint.caller.nice", nice)
        super().__init__()
        self._nice = nice
        self._io_priority = member("checkpoint.caller.io_priority", io_priority, IoPriority)
        #: What the process runs beside what each does; None: nothing.
        self._program: WriterProgram | None = None
        self._owned: ByteProcess | None = None

    @cached_property
    def _starting(self) -> AbstractContextManager[Any]:
        return self.outside.lock()

    def _connect(self, timeout: float) -> ByteProcess:
        with self._starting:  # another connection may need it too
            process = self._owned
            if process is not None and process.alive:
                return process
            if process is not None:
                logger.warning("the checkpoint writer process (pid %d) had ended; starting a new one", process.pid)
                process.close(timeout)
            self._owned = process = ByteProcess(timeout, self._program, self.outside)
            # By the trainer, because the process has no psutil.
            self.outside.lower_priority(process.pid, self._nice, self._io_priority)
            return process

    def close(self, timeout: float = 60.0) -> None:
        """Stop the process, which is idle or holds a save that was given up, or let it live on."""
        process, self._owned, self._process = self._owned, None, None
        if process is not None and self._outlives:
            process.leave()
        elif process is not None:
            process.close(timeout)


class TemporalCaller(_WriterProcessCaller):
    """A process per save: nothing runs between saves.

    Args:
        nice: how much the process yields the CPU to training, 0 to 19
        io_priority: how it queues for the disk

    Raises:
        CheckpointConfigError: a value out of range
    """

    def settle(self) -> None:
        """Stop the process, because its save is over."""
        timeout = 60.0 if self._unsettled is None else self._unsettled.timeouts.close
        super().settle()
        self.close(timeout)


class PersistentCaller(_WriterProcessCaller):
    """One process for the whole run, started when the checkpointer is built.

    Args:
        nice: how much the process yields the CPU to training, 0 to 19
        io_priority: how it queues for the disk
        page_cache: whether it keeps the newest checkpoint in the page cache

    Raises:
        CheckpointConfigError: a value out of range
    """

    def __init__(
        self, nice: int = 10, io_priority: IoPriority = IoPriority.low, page_cache: PageCache = PageCache.auto
    ) -> None:
        super().__init__(nice, io_priority)
        self._keeps_cached = member("checkpoint.caller.page_cache", page_cache, PageCache) is PageCache.auto

    def prepare(self, timeout: float) -> None:
        """Start the process."""
        self._running(timeout)

    def runs(self, program: WriterProgram) -> Callable[[float], ByteProcess]:
        """Have the process run another program, which does more; before it is started.

        Returns:
            What returns the process, started again if it has ended; called with a timeout.
        """
        self._program = program
        return self._connect

    def outlive(self) -> None:
        """Have `close` let the process live on, because the run has failed; only one with its own program does."""
        self._outlives = self._program is not None


#: How much longer than its deadline a server may take to say why it is late.
_GRACE_SECONDS = 5.0


class MemoryCaller(ConnectedCaller):
    """Runs requests whose target is in memory, on its own connection to a process that keeps snapshots.

    Args:
        connect: returns the process, which is started again if it has ended; called with a timeout
        outside: what it runs in
    """

    def __init__(self, connect: Callable[[float], ByteProcess], outside: Outside = OUTSIDE) -> None:
        super().__init__()
        self.outside = outside
        self._connect_process = connect

    def _connect(self, timeout: float) -> WriterConnection:
        self.close()
        return self._connect_process(timeout).open_connection(timeout)

    def prepare(self, timeout: float) -> None:
        """Connect, and start the process again if it has ended."""
        self._running(timeout)

    def retire(self, keep: Sequence[str], timeout: float) -> dict[int, bool]:
        """Drop what this rank's server has of all snapshots but these.

        Args:
            keep: paths of the snapshots that stay, the newest last. A save that becomes whole after the trainer has
                died replaces that one alone; one that must stay then, too, is named twice.
            timeout: seconds that it may take

        Returns:
            Whether other processes still read this server's arenas, by their numbers. Without those of a server that
            has died since, of which it is unknown.

        Raises:
            CheckpointSaveError: it could not
            WorkerDiedError: the server has died, and all snapshots with it
            CheckpointTimeoutError: it did not answer
        """
        connection = self._process
        if connection is None:
            return {}
        deadline = self.outside.now() + timeout
        held = self._asked("retire", connection, deadline, "timeouts.close", keep=list(keep))["held"]
        return {number: number in held for number in self._arenas}

    def listen(self, secret: str, address: str, timeout: float) -> int:
        """Have this rank's server let servers and trainers of other hosts in. A second call changes nothing.

        Args:
            secret: of the run, which they must know
            address: an address of this host that they reach
            timeout: seconds that it may take

        Returns:
            The TCP port, another one when the server was started again.

        Raises:
            CheckpointSaveError: it cannot listen there
            WorkerDiedError: the server has died
            CheckpointTimeoutError: it did not answer
        """
        deadline, connection = self.outside.now() + timeout, self._running(timeout)
        key = "timeouts.worker_start"
        return int(self._asked("listen", connection, deadline, key, secret=secret, address=address)["port"])

    def pull(
        self, path: str, homes: Sequence[tuple[Sequence[Any], float | None]], deadline: float
    ) -> Mapping[str, Any]:
        """Have this rank's server keep replicas of what other ranks have of a snapshot. Waits until all are there.

        Args:
            path: of the snapshot, which is whole and stays until then
            homes: the servers of those ranks, and the most bytes to ask each for in a second; None: no limit
            deadline: seconds of `Outside.now`

        Returns:
            `sent`, bytes of images that came over the network, as some are there already; `seconds`.

        Raises:
            CheckpointSaveError: one of the replicas is not there; it says why
            WorkerDiedError: this rank's server has died
            CheckpointTimeoutError: it did not answer
        """
        seconds = max(deadline - self.outside.now(), 0.0)
        connection, until = self._running(seconds), deadline + _GRACE_SECONDS
        return self._asked("pull", connection, until, "timeouts.write", path=path, homes=homes, seconds=seconds)

    def _asked(
        self, kind: str, connection: WriterConnection, deadline: float, key: str, **values: Any
    ) -> dict[str, Any]:
        """Send a frame to the server, and receive its answer; the connection is of no more use if that is late."""
        try:
            connection.send({"kind": kind, **values, "id": next(self._numbers)}, deadline)
            answer = connection.receive(deadline, key)
        except CheckpointTimeoutError:
            self.close()
            raise
        if answer["kind"] == "failed":
            raise as_local_error(answer, f"The snapshot server could not {kind}")
        return answer

    def close(self, timeout: float = 60.0) -> None:
        """Close the connection; the process belongs to another caller."""
        connection, self._process = self._process, None
        if connection is not None:
            connection.hang_up()


def _open_files(pid: int, folder: str) -> str:
    """Describe which files of a folder a process has open, to show where a write hangs."""
    names = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = os.readlink(f"/proc/{pid}/fd/{name}")
            if same_folder(os.path.dirname(path), folder):
                names.add(os.path.basename(path))
    except OSError:  # the process has ended, or a descriptor was closed just now
        return "the file that it was writing is unknown"
    return f"open files: {', '.join(sorted(names))}" if names else "none of its files was open"


def _written_by(pid: int) -> int:
    """Bytes written by a process, from /proc; 0 if the process has ended or the kernel does not count them."""
    try:
        return int(psutil.Process(pid).io_counters().write_chars)
    except (psutil.Error, OSError, AttributeError):
        return 0
