"""One attempt to make a checkpoint: staging folder, this rank's write, the vote of all ranks, the commit.

Runs on the saving thread. Every step is a question to the coordinator, so that all ranks learn one decision.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..callers.job import WriteJob
from ..callers.write_callers import WriteCaller
from ..coordination import Coordinator
from ..coordination.messages import pack, unpack
from ..errors import (
    CheckpointError,
    CheckpointSaveError,
    CheckpointStorageFullError,
    CheckpointTimeoutError,
    ranks_failed,
)
from ..formats.base import Writer
from ..memory.gc_control import give_back_freed
from ..stagers.snapshot import Comparison, Snapshot
from ..state.replicas import differing
from ..storage import commit
from ..storage.commit import Attempt
from ..storage.fencing import Ownership
from ..storage.fs import FsOps, wait_visible
from ..storage.liveness import AttemptLock
from ..storage.space import FULL, amount, full_text, refuse_without_room
from .report import SaveReport, Timeouts

logger = logging.getLogger(__name__)

#: How many keys a warning names.
_NAMED_KEYS = 10


@dataclass(frozen=True)
class Scheduled:
    """A save that all ranks agreed on.

    Attributes:
        attempt: target and token.
        snapshot: what this rank writes; None when it could not be taken.
        error: why it could not.
        started: when the save began (`time.perf_counter`).
    """

    attempt: Attempt
    snapshot: Snapshot | None
    error: Exception | None
    started: float


class AttemptRunner:
    """Takes scheduled saves to their end, one after the other.

    Args:
        caller: who runs the write job.
        writer: the format.
        ranks: how the ranks agree.
        fs: where effects go.
        timeouts: deadlines.
        min_free_bytes: what has to stay free beside a checkpoint; None: nobody looks beforehand.
    """

    def __init__(
        self,
        caller: WriteCaller,
        writer: Writer,
        ranks: Coordinator,
        fs: FsOps,
        timeouts: Timeouts,
        min_free_bytes: int | None,
    ) -> None:
        self._caller = caller
        self._writer = writer
        self._ranks = ranks
        self._fs = fs
        self._timeouts = timeouts
        self._min_free_bytes = min_free_bytes
        #: The claim to the folder of checkpoints, where a manager made one.
        self.ownership: Ownership | None = None
        #: The table whose catalog the leading rank has; and there, every rank's catalog (packed; a single rank's is not
        #: needed again) and the index of all.
        self._catalog_sent: int | None = None
        self._catalogs: dict[int, bytes] = {}
        self._sidecars: Mapping[str, bytes] = {}
        #: Keys of values that differ by rank and were warned about.
        self._warned: set[str] = set()
        #: By device: how it is written to fastest, where a job has tried that.
        self._io: dict[int, str] = {}

    def run(self, scheduled: Scheduled) -> SaveReport:
        """Write and commit; returns when the checkpoint is committed, on all ranks.

        Raises:
            CheckpointError: nothing became visible; with several ranks the same error on all of them.
        """
        attempt, ranks = scheduled.attempt, self._ranks
        name, token = os.path.basename(attempt.target), attempt.token
        ownership = self.ownership
        deadline = time.monotonic() + self._timeouts.stage + self._timeouts.write
        locks: list[AttemptLock] = []
        job: WriteJob | None = None
        mine: dict[str, Any] = {}

        def begin(said: list[dict[str, Any]]) -> list[list[int]]:
            self._learn_catalogs(said)
            needed = sum(each["bytes"] for each in said)
            with self._as_save_error(attempt.target, needed):
                if ownership is not None:
                    ownership.claim()  # which makes room, where an earlier run left something
                if self._min_free_bytes is not None:
                    refuse_without_room(self._fs, attempt.target, needed, self._min_free_bytes)
                commit.begin(self._fs, attempt)
                locks.append(commit.lock(self._fs, attempt))
            return differing([each.get("digests", {}) for each in said])

        def write() -> dict[str, Any]:
            nonlocal job
            if not ranks.leads:
                staging = attempt.staging
                wait_visible(lambda: self._fs.is_folder(staging), staging, self._timeouts.visible)
            job = self._job(scheduled)
            mine.update(self._write(job, scheduled.snapshot))
            return mine

        try:
            different = ranks.pool(f"{token}/begin", self._said(scheduled), begin, deadline)
            if scheduled.snapshot is not None:
                self._catalog_sent = scheduled.snapshot.sealed.table_number
                self._warn_of_lost(scheduled.snapshot.comparison, different)
            votes = ranks.vote(f"{token}/written", write, self._caller.progress, deadline)
            written_s = time.perf_counter() - scheduled.started
            files = ranks.lead(f"{token}/commit", lambda: self._publish(attempt, votes), deadline)
            if job is None or scheduled.snapshot is None:
                raise CheckpointSaveError(f"{attempt.target} was committed without this rank's part.")
            self._caller.decided(job)
        except BaseException:
            # First the writer process forgets the job, so that nobody commits what is being taken away.
            if job is not None:
                self._caller.decided(job)
            if ranks.leads:
                commit.abandon(self._fs, attempt)
            raise
        finally:
            for lock in locks:
                lock.close()
        committed_s = time.perf_counter() - scheduled.started
        logger.info("%s committed after %.2f s", name, committed_s)
        sealed = scheduled.snapshot.sealed
        return SaveReport(
            path=attempt.target,
            bytes=mine["bytes"],
            files=files,
            items=sealed.table.item_count + sum(len(extra.items) for extra in sealed.extras),
            staged_s=scheduled.snapshot.staged_at - scheduled.started,
            written_s=written_s,
            committed_s=committed_s,
            write_s=mine["seconds"],
        )

    def _said(self, scheduled: Scheduled) -> dict[str, Any]:
        """Why this rank has nothing to write; or how much, and where it will stand unless that is known."""
        if scheduled.snapshot is None:
            error = scheduled.error
            return {"error": f"{type(error).__name__}: {error}", "cause": type(error).__name__}
        sealed = scheduled.snapshot.sealed
        said: dict[str, Any] = {"bytes": sealed.file_bytes}
        if scheduled.snapshot.comparison is not None:
            said["digests"] = scheduled.snapshot.comparison.message
        return said if sealed.table_number == self._catalog_sent else {**said, "catalog": sealed.catalog}

    def _warn_of_lost(self, comparison: Comparison | None, different: Sequence[Sequence[int]]) -> None:
        """Name what differs by rank although the ranks share it; the first rank that has a value, and once."""
        mine = {group for group, rank in different if rank == self._ranks.rank}
        if comparison is None or not mine:
            return
        keys = [key for key in comparison.replicas.keys(mine) if key not in self._warned]
        self._warned.update(keys)
        if keys:
            more = f" and {len(keys) - _NAMED_KEYS} more" if len(keys) > _NAMED_KEYS else ""
            logger.warning(
                "%d %s by rank, and only what one rank has is saved: %s%s. Wrap what every rank needs back as its own "
                "(PerRank(value), from ckpt_component import PerRank), or make it equal on all ranks before the save.",
                len(keys),
                "value differs" if len(keys) == 1 else "values differ",
                ", ".join(map(repr, keys[:_NAMED_KEYS])),
                more,
            )

    def _learn_catalogs(self, said: Sequence[Mapping[str, Any]]) -> None:
        """On the leading rank, before the write: its writer process may have to commit when the trainers are gone."""
        errors = {rank: each["error"] for rank, each in enumerate(said) if "error" in each}
        if errors:
            raise ranks_failed(errors, causes={rank: said[rank]["cause"] for rank in errors})
        fresh = {rank: each["catalog"] for rank, each in enumerate(said) if "catalog" in each}
        if not fresh:
            return
        if len(said) > 1:
            self._catalogs.update({rank: pack(catalog) for rank, catalog in fresh.items()})
        self._sidecars = self._writer.index(
            [fresh[rank] if rank in fresh else unpack(self._catalogs[rank]) for rank in range(len(said))]
        )
        give_back_freed()

    def _job(self, scheduled: Scheduled) -> WriteJob:
        """This rank's write job; its snapshot is complete, unless the writer can follow while it is being taken."""
        snapshot = scheduled.snapshot
        if snapshot is None:
            raise CheckpointSaveError(f"There is no snapshot for {scheduled.attempt.target}.")
        follows = snapshot.progress is not None and self._caller.in_other_process and not snapshot.staged.done()
        if not follows:
            self._await_staged(snapshot, scheduled.attempt.target)
        return WriteJob(
            fs=self._fs,
            attempt=scheduled.attempt,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            sealed=snapshot.sealed,
            sidecars=self._sidecars,
            source=snapshot.source,
            arena=snapshot.arena,
            options=replace(self._writer.options, io=self._io_for(scheduled.attempt)),
            about=self._about,
            patience=self._timeouts.heartbeat,
            visible=self._timeouts.visible,
            progress=snapshot.progress if follows else None,
            stage_seconds=self._timeouts.stage if follows else 0.0,
        )

    def _await_staged(self, snapshot: Snapshot, target: str) -> None:
        """Return when the snapshot is complete; raise what made it worthless, or that it takes too long."""
        try:
            snapshot.staged.result(timeout=self._timeouts.stage)
        except TimeoutError as error:
            if not snapshot.staged.done():
                raise self._late(target) from error
            raise
        size = amount(snapshot.layout.payload_bytes)
        logger.info("%s staged: %s in %.3f s", os.path.basename(target), size, snapshot.staged_at - snapshot.started)

    def _late(self, target: str) -> CheckpointTimeoutError:
        return CheckpointTimeoutError(
            f"The snapshot for {target} was not complete after {self._timeouts.stage:g} s (timeouts.stage)."
        )

    @property
    def _about(self) -> dict[str, Any]:
        return {"format": self._writer.format}

    def _io_for(self, attempt: Attempt) -> str:
        wanted = self._writer.options.io
        return self._io.get(_device_of(attempt), wanted) if wanted == "auto" else wanted

    def _write(self, job: WriteJob, snapshot: Snapshot | None) -> dict[str, Any]:
        """This rank's vote: what it wrote. Where that fails because of the snapshot, the snapshot's error is raised."""
        began = time.monotonic()
        deadline = began + self._timeouts.write + job.stage_seconds
        target = job.attempt.target
        try:
            with self._as_save_error(target, job.sealed.file_bytes):
                mine = dict(self._caller.run(job, deadline))
        except CheckpointError as error:
            if job.progress is not None and snapshot is not None:
                if snapshot.staged.done():
                    self._await_staged(snapshot, target)
                elif time.monotonic() - began >= job.stage_seconds:
                    raise self._late(target) from error
            raise
        if job.progress is not None and snapshot is not None:
            self._await_staged(snapshot, target)
        if job.options.io == "auto" and mine["io"] != "auto":
            self._io[_device_of(job.attempt)] = mine["io"]
            logger.info("checkpoint.writer.io=auto: %s, which a trial found to be faster there", mine["io"])
        logger.info(
            "%s written: %s in %.2f s (%.2f GB/s)",
            os.path.basename(job.attempt.target),
            amount(mine["bytes"]),
            mine["seconds"],
            mine["bytes"] / 1e9 / max(mine["seconds"], 1e-9),
        )
        return mine

    def _publish(self, attempt: Attempt, votes: Sequence[dict[str, Any]]) -> int:
        """On the leading rank: commit what all have written. Returns how many files the checkpoint has."""
        with self._as_save_error(attempt.target, sum(map(len, self._sidecars.values()))):
            return commit.publish(self._fs, attempt, votes, self._sidecars, self._about, self._timeouts.visible)

    @contextlib.contextmanager
    def _as_save_error(self, path: str, needed: int) -> Iterator[None]:
        """Turn errors of the file system into typed ones; a full disk is reported with the numbers.

        A run that lost the root raises CheckpointFencedError: the new owner may have deleted its files.
        """
        try:
            yield
        except (CheckpointSaveError, OSError) as error:
            if self._ranks.leads and self.ownership is not None:
                self.ownership.check_after(error)
            known = isinstance(error, CheckpointSaveError)
            if error.errno in FULL and not isinstance(error, CheckpointStorageFullError):
                text = str(error) if known else f"{path} could not be saved: {error}."
                numbers = full_text(self._fs, path, needed, error.errno)
                full = CheckpointStorageFullError(f"{text} {numbers}", error.errno)
                raise full from (error.__cause__ if known else error)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointSaveError(f"{path} could not be saved: {error}.", error.errno) from error


def _device_of(attempt: Attempt) -> int:
    return os.stat(os.path.dirname(attempt.target)).st_dev
