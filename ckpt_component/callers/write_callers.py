"""Who runs a write job: the trainer itself, a process per save, or one process for the whole run.

The process is the torch-free byte writer. A job's constant part (tables, the arena's descriptor) is sent once per
process; a save is then a frame of a few hundred bytes and the encoded objects.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import psutil

from ..errors import CheckpointSaveError, CheckpointTimeoutError, WorkerDiedError
from ..image.arena import Arena
from ..options import NICE, IoPriority
from ..storage.checksum import home_of
from ..writing.process import ByteProcess
from ..writing.remote_error import RemoteTraceback
from ..writing.write_job import run_write_job
from .job import WriteJob

logger = logging.getLogger(__name__)


class WriteCaller(ABC):
    """Decides which process runs a write job."""

    #: Whether the writing happens in another process, so that the image must be visible to it. It may then begin while
    #: the image is still being filled.
    in_other_process: ClassVar[bool]

    def connect(self, *, start_timeout: float, close_timeout: float) -> None:
        """Learn the deadlines (seconds), and warm up what can be warmed up.

        Raises:
            CheckpointTimeoutError, WorkerDiedError: the writer process did not come up.
        """
        self._start_timeout = start_timeout
        self._close_timeout = close_timeout

    @abstractmethod
    def run(self, job: WriteJob, deadline: float) -> Mapping[str, Any]:
        """Get one job done before `deadline` (monotonic seconds); called by one thread at a time.

        Returns:
            What was written, as `WriteResult` in plain form.

        Raises:
            CheckpointSaveError: the write failed; the caller can take the next job all the same.
            CheckpointTimeoutError: the deadline passed; the process that hung was killed.
        """

    def progress(self) -> int:
        """Bytes that whoever writes has written since it started; other ranks tell slow from hung by it."""
        return _written_by(os.getpid())

    def decided(self, job: WriteJob) -> None:
        """The job's save was committed or given up."""

    def close(self) -> None:
        """End what runs. Bounded; safe to call twice."""


class InlineCaller(WriteCaller):
    """The trainer writes, here and now."""

    in_other_process: ClassVar[bool] = False
    option: ClassVar[str] = "inline"

    def run(self, job: WriteJob, deadline: float) -> Mapping[str, Any]:
        """Write with as many threads as the writer has workers. The deadline cannot interrupt a system call."""
        try:
            result = run_write_job(
                job.fs,
                job.attempt.staging,
                job.rank,
                job.sealed.table,
                job.source,
                job.sealed.extras,
                job.options,
            )
        except OSError as error:
            raise CheckpointSaveError(f"Writing {job.attempt.target} failed: {error}.", error.errno) from error
        return asdict(result)


class _ProcessCaller(WriteCaller):
    """What both background callers share: the process and what it already knows."""

    in_other_process: ClassVar[bool] = True

    def __init__(self, nice: int = 10, io_priority: IoPriority = IoPriority.low) -> None:
        NICE.check("checkpoint.caller.nice", nice)
        self._nice = nice
        self._io_priority = io_priority
        self._process: ByteProcess | None = None
        self._arenas: dict[int, Arena] = {}
        #: What the process knows already: the number of its table, and the files beside it.
        self._known: tuple[int, Mapping[str, bytes]] | None = None
        self._jobs = itertools.count()

    @property
    def pid(self) -> int | None:
        """The writer process's id, or None when none runs."""
        process = self._process  # the saving thread may let go of it meanwhile
        return process.pid if process is not None and process.alive else None

    def run(self, job: WriteJob, deadline: float) -> Mapping[str, Any]:
        """Send the job to the process, which is started when there is none, and wait for its answer."""
        process = self._running()
        number = next(self._jobs)
        try:
            self._send(process, job, number, deadline)
            answer = process.receive(deadline, "timeouts.write")
        except (WorkerDiedError, CheckpointTimeoutError) as error:
            where = _open_files(process.pid, job.attempt.staging)
            process.kill()
            self._process = None
            if isinstance(error, WorkerDiedError):
                raise
            raise CheckpointTimeoutError(
                f"Rank {job.rank}'s part of {job.attempt.target} was not written in time; {where}. {error}"
            ) from error
        finally:
            if job.progress is not None:
                job.progress.leave()
        asked_for = answer["kind"] in ("done", "failed") and answer["id"] == number
        if not asked_for:
            process.kill()
            self._process = None
        if answer["kind"] == "failed":
            raise CheckpointSaveError(
                f"Writing {job.attempt.target} failed in the writer process (pid {process.pid}): {answer['error']}.",
                answer["errno"],
            ) from RemoteTraceback(answer["traceback"])
        if not asked_for:
            raise CheckpointSaveError(
                f"Writing {job.attempt.target} failed: the writer process (pid {process.pid}) answered request {number}"
                f" with a frame {answer['kind']!r} for request {answer.get('id')}."
            )
        return dict(answer["result"])

    def progress(self) -> int:
        """See `WriteCaller.progress`."""
        pid = self.pid
        return 0 if pid is None else _written_by(pid)

    def decided(self, job: WriteJob) -> None:
        """Let the process forget the job, which it would otherwise commit when the trainer died."""
        process = self._process
        if process is not None and process.alive:
            try:
                process.send({"kind": "decided"}, time.monotonic() + self._close_timeout)
            except (WorkerDiedError, CheckpointTimeoutError) as error:
                # The save itself is over; the next one starts a new process.
                logger.warning("%s", error)
                process.kill()
                self._process = None

    def close(self) -> None:
        """End the process; it is idle, or its save was given up."""
        process, self._process = self._process, None
        if process is not None:
            process.close(self._close_timeout)

    def _running(self) -> ByteProcess:
        process = self._process
        if process is not None:
            if process.alive:
                return process
            logger.warning("the checkpoint writer process (pid %d) had ended; starting a new one", process.pid)
            process.close(self._close_timeout)
        self._arenas, self._known = {}, None
        self._process = process = ByteProcess(self._start_timeout)
        self._lower_priority(process.pid)
        return process

    def _lower_priority(self, pid: int) -> None:
        """Training keeps its cores and its disk; done from here because the process itself has no psutil."""
        try:
            process = psutil.Process(pid)
            process.nice(max(self._nice, process.nice()))
            if self._io_priority is IoPriority.low:
                process.ionice(psutil.IOPRIO_CLASS_BE, 7)
            elif self._io_priority is IoPriority.idle:
                process.ionice(psutil.IOPRIO_CLASS_IDLE)
        except (psutil.Error, OSError) as error:
            logger.warning("the checkpoint writer process keeps its normal priority (%s)", error)

    def _send(self, process: ByteProcess, job: WriteJob, number: int, deadline: float) -> None:
        table, table_number, sealed = job.sealed.table, job.sealed.table_number, job.sealed
        if job.arena is not None and job.arena.number not in self._arenas:
            retired = [known for known, arena in self._arenas.items() if arena.closed]
            header = {"kind": "arena", "id": job.arena.number, "size": job.arena.nbytes, "retired": retired}
            process.send(header, deadline, fds=[job.arena.shared_descriptor()])
            self._arenas = {known: arena for known, arena in self._arenas.items() if not arena.closed}
            self._arenas[job.arena.number] = job.arena
        if self._known is None or self._known[0] != table_number or self._known[1] is not job.sidecars:
            named = [(name, len(data)) for name, data in job.sidecars.items()]
            plain, parts = table.to_parts()
            header = {
                "kind": "table",
                "id": table_number,
                "table": plain,
                "sidecars": named,
                # It runs without site-packages, where the package of a checksum is.
                "checksum_home": home_of(table.checksum),
            }
            process.send(header, deadline, blobs=[*parts, *job.sidecars.values()])
            self._known = (table_number, job.sidecars)
        extras = [
            {"file": extra.file, "offset": extra.offset, "size": extra.data.nbytes, "items": list(extra.items)}
            for extra in sealed.extras
        ]
        header = {
            "kind": "write",
            "id": number,
            "table": table_number,
            "arena": None if job.arena is None else job.arena.number,
            "target": job.attempt.target,
            "token": job.attempt.token,
            "owner": job.attempt.owner,
            "staging": job.attempt.staging,
            "rank": job.rank,
            "world_size": job.world_size,
            "durable": job.fs.durable,
            "atomic_rename": job.fs.atomic_rename,
            "options": asdict(job.options),
            "extras": extras,
            "about": dict(job.about),
            "patience": job.patience,
            "visible": job.visible,
            "seconds": max(deadline - time.monotonic(), 0.0),
            "stage_seconds": job.stage_seconds,
        }
        pipes = [] if job.progress is None else [job.progress.follow()]
        try:
            process.send(header, deadline, blobs=[extra.data for extra in sealed.extras], fds=pipes)
        finally:
            for pipe in pipes:
                os.close(pipe)


def _open_files(pid: int, folder: str) -> str:
    """Which files of a folder a process has open, in words: where a write hangs."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = os.readlink(f"/proc/{pid}/fd/{name}")
            if os.path.dirname(path) == folder:
                found.add(os.path.basename(path))
    except OSError:  # it is gone, or a descriptor was closed just now
        return "which file it was at is not known"
    return f"open were {', '.join(sorted(found))}" if found else "no file of it was open"


def _written_by(pid: int) -> int:
    """From the kernel's own account; 0 for a process that is gone, or where there is no such account."""
    try:
        return int(psutil.Process(pid).io_counters().write_chars)
    except (psutil.Error, OSError, AttributeError):
        return 0


class TemporalCaller(_ProcessCaller):
    """A process per save: nothing runs between saves.

    Args:
        nice: how much the process yields the CPU to training, 0 to 19.
        io_priority: how it queues for the disk.

    Raises:
        CheckpointConfigError: a value out of range.
    """

    option: ClassVar[str] = "temporal"

    def decided(self, job: WriteJob) -> None:
        """The save is over, and so is its process."""
        super().decided(job)
        self.close()


class PersistentCaller(_ProcessCaller):
    """One process for the whole run, started and warmed up when the checkpointer is built.

    Args:
        nice: how much the process yields the CPU to training, 0 to 19.
        io_priority: how it queues for the disk.

    Raises:
        CheckpointConfigError: a value out of range.
    """

    option: ClassVar[str] = "persistent"

    def connect(self, *, start_timeout: float, close_timeout: float) -> None:
        """Start the process; see `WriteCaller.connect`."""
        super().connect(start_timeout=start_timeout, close_timeout=close_timeout)
        self._running()
