"""One save after staging: write job, vote, commit, and the report of it.

A thread of its own takes the saves in order, so that the training thread never waits for storage, and the commit never
needs the training thread.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from .callers.write_callers import WriteCaller
from .coordination import Coordinator
from .errors import CheckpointError, CheckpointSaveError, CheckpointTimeoutError
from .stagers.base import Snapshot, Stager
from .storage import commit
from .storage.fs import FsOps
from .writers.base import Writer
from .writers.job import WriteJob

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveReport:
    """What became of one save. Times are seconds from the call of `save`.

    Attributes:
        path: the checkpoint's path.
        outcome: `committed`, `failed`, or `skipped` (by the manager's `overlap: skip`).
        step: the training step, when a manager made the save.
        error: the text of what went wrong.
        bytes: written, all files of this rank.
        files: how many, the manifest included.
        items: tensors and objects stored, ties once.
        stall_s: how long the call kept training waiting.
        staged_s: when training could change the tensors again.
        written_s: when this rank's files were durable.
        committed_s: when the checkpoint was visible, on all ranks.
        write_s: how long the writing itself took.
    """

    path: str
    outcome: str = "committed"
    step: int | None = None
    error: str | None = None
    bytes: int = 0
    files: int = 0
    items: int = 0
    stall_s: float = 0.0
    staged_s: float = 0.0
    written_s: float = 0.0
    committed_s: float = 0.0
    write_s: float = 0.0

    @property
    def write_gbps(self) -> float:
        """Gigabytes (1e9) per second of the writing."""
        return self.bytes / 1e9 / self.write_s if self.write_s > 0 else 0.0


class SaveFuture(Future[SaveReport]):
    """The future of the save of `path`; `delivered` tells whether its error has reached somebody."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.delivered = False

    def result(self, timeout: float | None = None) -> SaveReport:
        """The report, or the save's error raised."""
        try:
            report = super().result(timeout)
        except BaseException:
            self.delivered = self.done()
            raise
        return report

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The save's error, or None."""
        error = super().exception(timeout)
        self.delivered = True
        return error


@dataclass(frozen=True)
class Timeouts:
    """Deadlines in seconds, from `timeouts.*`."""

    worker_start: float = 30.0
    stage: float = 300.0
    write: float = 1800.0
    close: float = 60.0


class Saver:
    """Writes and commits snapshots, one after the other.

    Args:
        caller: who runs the write job; connected, and owned by the saver from now on.
        writer: the format, for block size and name.
        coordinator: how the ranks agree.
        fs: where effects go.
        timeouts: deadlines.

    Attributes:
        after_commit: called with the path after every commit, on the saving thread, before the save's future is done.
    """

    def __init__(
        self, caller: WriteCaller, writer: Writer, coordinator: Coordinator, fs: FsOps, timeouts: Timeouts
    ) -> None:
        self._caller = caller
        self._writer = writer
        self._coordinator = coordinator
        self._fs = fs
        self._timeouts = timeouts
        self.after_commit: Callable[[str], None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-save")
        self._closing = threading.Lock()
        self._closed = False
        self._last: Future[SaveReport] | None = None
        # A script that forgets close(): the interpreter first lets the save thread finish, then runs this.
        self._at_exit = atexit.register(_close_if_alive, weakref.ref(self))

    @property
    def caller(self) -> WriteCaller:
        """Who runs the write jobs."""
        return self._caller

    def write(self, snapshot: Snapshot, path: str) -> SaveFuture:
        """Write and commit a snapshot in the background. The snapshot is released when the save is over.

        Args:
            snapshot: from a stager; its staging may still run.
            path: absolute path of the checkpoint to be; taken paths are refused.

        Returns:
            A future with the `SaveReport`.
        """
        future = SaveFuture(path)
        future.set_running_or_notify_cancel()
        if self._closed:
            snapshot.release()
            raise CheckpointError("This checkpointer is closed; build a new one to save again.")
        self._last = future
        stall_s = time.perf_counter() - snapshot.started
        self._thread.submit(self._save, snapshot, path, stall_s, future)
        return future

    def close(self) -> None:
        """Let the saves that were started finish, then end the writer process. Safe to call twice.

        Raises:
            CheckpointTimeoutError: a save hung; its deadline is timeouts.write.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self._at_exit)
        try:
            self._drain()
        finally:
            self._thread.shutdown(wait=False)
            self._caller.close()

    def _drain(self) -> None:
        last = self._last
        if last is None or last.done():
            return
        limit = self._timeouts.stage + self._timeouts.write + self._timeouts.close
        try:
            Future.exception(last, limit)
        except TimeoutError as error:
            raise CheckpointTimeoutError(
                f"A save was still running {limit:g} s after close(); see timeouts.stage and timeouts.write."
            ) from error

    def _save(self, snapshot: Snapshot, path: str, stall_s: float, future: SaveFuture) -> None:
        try:
            report = replace(self._write_and_commit(snapshot, path), stall_s=stall_s)
        except BaseException as error:
            logger.error("%s was not saved: %s", path, error)
            snapshot.release()
            future.set_exception(error)
        else:
            snapshot.release()
            self._tell_commit(path)
            future.set_result(report)

    def _tell_commit(self, path: str) -> None:
        if self.after_commit is None:
            return
        try:
            self.after_commit(path)
        except Exception:
            # The checkpoint is committed, whatever its owner makes of it.
            logger.exception("%s is committed, but what follows a commit failed", path)

    def _write_and_commit(self, snapshot: Snapshot, path: str) -> SaveReport:
        name = os.path.basename(path)
        try:
            snapshot.staged.result(timeout=self._timeouts.stage)
        except TimeoutError as error:
            if not snapshot.staged.done():
                raise CheckpointTimeoutError(
                    f"The snapshot for {path} was not complete after {self._timeouts.stage:g} s (timeouts.stage)."
                ) from error
            raise
        staged_s = snapshot.staged_at - snapshot.started
        size = snapshot.layout.payload_bytes
        logger.info("%s staged: %s in %.3f s", name, _size(size), staged_s)
        deadline = time.monotonic() + self._timeouts.write
        coordinator, fs = self._coordinator, self._fs
        token = coordinator.agree_on_attempt(path, deadline)
        attempt = commit.Attempt(path, token)
        job = self._job(snapshot, attempt)
        lock: int | None = None
        try:
            if coordinator.leads:
                with _as_save_error(path):
                    commit.begin(fs, path, token)
                    lock = fs.lock_shared(attempt.staging)
            votes = coordinator.collect_votes(token, self._vote(job, deadline), deadline)
            written_s = time.perf_counter() - snapshot.started
            mine = votes[coordinator.rank]
            logger.info(
                "%s written: %s in %.2f s (%.2f GB/s)",
                name,
                _size(mine["bytes"]),
                mine["seconds"],
                mine["bytes"] / 1e9 / max(mine["seconds"], 1e-9),
            )
            files = self._commit(job, votes, deadline)
            self._caller.decided(job)
        except BaseException:
            # First the writer process forgets the job, so that nobody commits what is being taken away.
            self._caller.decided(job)
            if coordinator.leads:
                commit.abandon(fs, attempt)
            raise
        finally:
            if lock is not None:
                os.close(lock)
        committed_s = time.perf_counter() - snapshot.started
        logger.info("%s committed after %.2f s", name, committed_s)
        return SaveReport(
            path=path,
            bytes=mine["bytes"],
            files=files,
            items=snapshot.sealed.table.item_count + sum(len(extra.items) for extra in snapshot.sealed.extras),
            staged_s=staged_s,
            written_s=written_s,
            committed_s=committed_s,
            write_s=mine["seconds"],
        )

    def _job(self, snapshot: Snapshot, attempt: commit.Attempt) -> WriteJob:
        alone = self._coordinator.world_size == 1
        return WriteJob(
            fs=self._fs,
            attempt=attempt,
            rank=self._coordinator.rank,
            sealed=snapshot.sealed,
            source=snapshot.source,
            arena=snapshot.arena,
            block_bytes=self._writer.block_bytes,
            about={"format": self._writer.format},
            commit_alone=alone,
        )

    def _vote(self, job: WriteJob, deadline: float) -> Any:
        try:
            return self._caller.run(job, deadline)
        except Exception as error:
            return error

    def _commit(self, job: WriteJob, votes: Any, deadline: float) -> int:
        files, failure = 0, None
        if self._coordinator.leads:
            try:
                with _as_save_error(job.attempt.target):
                    files = commit.publish(self._fs, job.attempt, votes, job.sealed.sidecars, job.about)
            except Exception as error:
                failure = error
        self._coordinator.announce(job.attempt.token, failure, deadline)
        return files


@contextlib.contextmanager
def _as_save_error(path: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointSaveError(f"{path} could not be saved: {error}.", error.errno) from error


class StagedWriter:
    """What a `SyncCheckpointer` writes with: stage, save, and wait for the commit.

    Args:
        stager: connected; closed with the writer.
        saver: closed with the writer.
    """

    def __init__(self, stager: Stager, saver: Saver) -> None:
        self.stager = stager
        self.saver = saver

    def write(self, state_dict: Mapping[Any, Any], path: str) -> SaveReport:
        """Return when the checkpoint is committed, or raise what went wrong."""
        started = time.perf_counter()
        report = self.saver.write(self.stager.stage(state_dict), path).result()
        return replace(report, stall_s=time.perf_counter() - started)

    def close(self) -> None:
        """Free memory and processes."""
        try:
            self.stager.close()
        finally:
            self.saver.close()


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def _close_if_alive(saver: weakref.ref[Saver]) -> None:
    alive = saver()
    if alive is not None:
        alive.close()
