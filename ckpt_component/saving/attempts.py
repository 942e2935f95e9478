"""One attempt to make a checkpoint: staging folder, this rank's write, the vote of all ranks, the commit.

It runs on the save thread. Every step goes through the coordinator, so that all ranks get the same decision.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait as wait_futures
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from ..callers.write_callers import WriteCaller
from ..core.commit import commit
from ..core.commit.fencing import FencingToken
from ..core.commit.liveness import AttemptLock
from ..core.commit.visibility import wait_visible
from ..core.coordination import Coordinator
from ..core.memory.gc_control import give_back_freed
from ..core.options import ResolvedTimeouts
from ..core.state.replicas import differing
from ..core.storage.space import FULL, amount, full_text, rate, refuse_without_room
from ..core.writing.request import WriteRequest
from ..errors import (
    CheckpointError,
    CheckpointSaveError,
    CheckpointStorageFullError,
    CheckpointTimeoutError,
    describe_error,
    ranks_failed,
)
from ..events import EventRecorder, SaveReport
from ..stagers.base import Snapshot
from ..writers.base import Writer
from .in_flight import PendingSave

logger = logging.getLogger(__name__)

#: How many keys a warning names.
_NAMED_KEYS = 10


class RunHooks(Protocol):
    """Hooks of a run for each of its saves, called on rank 0 only.

    Attributes:
        ownership: fencing token of the checkpoint folder; the first save acquires it.
        files: small files that rank 0 adds to every checkpoint, by name.
        manifest_fields: plain values for every manifest.
    """

    ownership: FencingToken
    files: Mapping[str, bytes]
    manifest_fields: Mapping[str, Any]

    def check_path(self, path: str) -> None:
        """Called before a save begins; an exception stops the save."""

    def after_commit(self, report: SaveReport) -> None:
        """Called on the save thread before the save's future is done."""

    def after_save(self, report: SaveReport) -> None:
        """Called on the save thread after the save's future is done; the next save and `close` wait for it."""

    def make_room(self) -> None:
        """Called on the save thread if there is no room for a save; returns when there may be more."""

    def close(self) -> None:
        """Called on the save thread when all saves have ended and no other begins; raises nothing."""


class SaveTransaction:
    """Runs save attempts, one after the other.

    Args:
        caller: who runs the write request.
        writer: the format.
        ranks: coordinator of the ranks.
        timeouts: deadlines.
        min_free_bytes: free space that a save must leave; None: free space is not checked beforehand.
        events: records how far a save is.
        hooks: hooks of the run.
    """

    def __init__(
        self,
        caller: WriteCaller,
        writer: Writer,
        ranks: Coordinator,
        timeouts: ResolvedTimeouts,
        min_free_bytes: int | None,
        events: EventRecorder,
        hooks: RunHooks | None = None,
    ) -> None:
        self._caller = caller
        self._writer = writer
        self._ranks = ranks
        self._leads = ranks.is_leader
        self._timeouts = timeouts
        self._min_free_bytes = min_free_bytes
        self._events = events
        self._hooks = hooks
        self._manifest_fields = {"format": writer.format}
        #: The table whose index was sent to the leading rank. All ranks replan together, so that rank gets all
        #: indexes or none; it keeps the sidecars made from them, and the numbers of their tables.
        self._index_sent: int | None = None
        self._indexed: list[int] = []
        self._sidecars: Mapping[str, bytes] = {}
        #: Keys of values that differ by rank and were warned about.
        self._warned: set[str] = set()
        #: By device: the faster I/O mode, where a request has made a trial.
        self._fastest_io: dict[int, str] = {}

    def run(self, save: PendingSave) -> None:
        """Write and commit; returns when the checkpoint is committed, on all ranks.

        Raises:
            CheckpointError: the attempt failed, and nothing became visible; the same error on all ranks.
        """
        attempt, tag = save.attempt, save.attempt.token
        deadline = time.monotonic() + self._timeouts.stage + self._timeouts.write
        with contextlib.ExitStack() as locks:
            try:
                snapshot = self._begin(save, locks, deadline)
                write = partial(self._write, save, snapshot)
                votes = self._ranks.all_succeed(f"{tag}/written", write, self._caller.progress, deadline)
                voted = time.perf_counter()
                save.mark("vote", save.written["began"] + save.written["seconds"], voted)
                save.files = self._ranks.run_on_leader(f"{tag}/commit", partial(self._publish, save, votes), deadline)
            except BaseException:
                # First the writer process forgets the save, so that it does not commit what is being deleted.
                self._caller.settle()
                self._index_sent = None
                if self._leads:
                    commit.abandon(attempt)
                raise
            self._caller.settle()
        save.mark("commit", voted, time.perf_counter())
        logger.info("%s committed after %.2f s", os.path.basename(attempt.target), save.spans["commit"][1])
        if self._hooks is not None and self._leads:
            notify(self._hooks.after_commit, save.describe("committed"))
        if not self._caller.in_other_process:
            save.stall_s = time.perf_counter() - save.started

    def _begin(self, save: PendingSave, locks: contextlib.ExitStack, deadline: float) -> Snapshot:
        """Send what this rank is going to write; the leading rank makes the staging folder."""
        snapshot = save.snapshot
        if snapshot is None:
            error = save.error or CheckpointSaveError("there is no snapshot")
            message: dict[str, Any] = {"error": describe_error(error), "cause": type(error).__name__}
        else:
            message = {"bytes": snapshot.encoded.file_bytes, "table": snapshot.encoded.table.number}
            if snapshot.comparison is not None:
                message["digests"] = snapshot.comparison.message
            if snapshot.encoded.table.number != self._index_sent:
                message["rank_index"] = snapshot.encoded.rank_index()
        make_folder = partial(self._make_folder, save, locks)
        different = self._ranks.decide(f"{save.attempt.token}/begin", message, make_folder, deadline)
        if snapshot is None:
            raise CheckpointSaveError(f"{save.path} was begun without a snapshot of this rank.")
        self._index_sent = snapshot.encoded.table.number
        save.items = snapshot.encoded.table.item_count + sum(len(blob.items) for blob in snapshot.encoded.object_blobs)
        if different:
            self._warn_of_lost(snapshot, different)
        return snapshot

    def _make_folder(
        self, save: PendingSave, locks: contextlib.ExitStack, messages: Sequence[Mapping[str, Any]]
    ) -> list[list[int]]:
        """On the leading rank: make the staging folder. Returns which shared values differ by rank."""
        failures: dict[int, str] = {}
        digests, tables, needed = [], [], 0
        for rank, message in enumerate(messages):
            if "error" in message:
                failures[rank] = message["error"]
                continue
            needed += message["bytes"]
            tables.append(message["table"])
            digests.append(message.get("digests", {}))
        if failures:
            raise ranks_failed(failures, causes={rank: messages[rank]["cause"] for rank in failures})
        if tables != self._indexed:
            # Before the write: rank 0's writer process may have to commit if the trainers die.
            index = self._writer.index([message["rank_index"] for message in messages])
            self._sidecars = index if self._hooks is None else {**index, **self._hooks.files}
            self._indexed = tables
            give_back_freed()
        with self._typed_errors(save, needed):
            if self._hooks is not None:
                self._hooks.ownership.acquire()  # also deletes what an earlier run left
            if self._min_free_bytes is not None:
                self._refuse_without_room(save, needed, self._min_free_bytes)
            commit.begin(save.attempt)
            locks.callback(AttemptLock(save.fs, save.attempt).close)
        return differing(digests) if len(messages) > 1 else []

    def _refuse_without_room(self, save: PendingSave, needed: int, margin: int) -> None:
        try:
            refuse_without_room(save.fs, save.path, needed, margin)
        except CheckpointStorageFullError:
            if self._hooks is None:
                raise
            self._hooks.make_room()
            refuse_without_room(save.fs, save.path, needed, margin)

    def _warn_of_lost(self, snapshot: Snapshot, different: Sequence[Sequence[int]]) -> None:
        """Warn of shared values that differ by rank: once each, on the first rank that has the value."""
        groups = {group for group, rank in different if rank == self._ranks.rank}
        if snapshot.comparison is None or not groups:
            return
        keys = [key for key in snapshot.comparison.replicas.keys(groups) if key not in self._warned]
        self._warned.update(keys)
        if keys:
            more = f" and {len(keys) - _NAMED_KEYS} more" if len(keys) > _NAMED_KEYS else ""
            logger.warning(
                "%d %s by rank, and only one rank's value is saved: %s%s. Wrap what every rank needs back as its own "
                "(PerRank(value), from ckpt_component import PerRank), or make it equal on all ranks before the save.",
                len(keys),
                "value differs" if len(keys) == 1 else "values differ",
                ", ".join(map(repr, keys[:_NAMED_KEYS])),
                more,
            )

    def _write(self, save: PendingSave, snapshot: Snapshot) -> Mapping[str, Any]:
        """Write this rank's files once its snapshot is complete; returns its vote, which is what it wrote."""
        attempt, encoded, options = save.attempt, snapshot.encoded, self._writer.options
        if not self._leads:
            wait_visible(lambda: save.fs.is_folder(attempt.staging), attempt.staging, self._timeouts.visible)
        if wait_futures([snapshot.staged], self._timeouts.stage).not_done:
            raise CheckpointTimeoutError(
                f"The snapshot for {save.path} was not complete after {self._timeouts.stage:g} s (timeouts.stage)."
            )
        snapshot.staged.result(0)  # raises the error of a failed snapshot
        if save.attempts == 1:
            self._note_staged(save, snapshot)
        device = -1
        if options.io == "auto":
            device = save.fs.device(os.path.dirname(attempt.target))
            options = replace(options, io=self._fastest_io.get(device, "auto"))
        request = WriteRequest(
            save.fs,
            attempt,
            self._ranks.rank,
            self._ranks.world_size,
            encoded.table,
            encoded.object_blobs,
            snapshot.source,
            options,
            self._fields(save),
            self._timeouts,
            self._sidecars,
        )
        before = self._caller.progress()
        save.written_now = lambda: max(self._caller.progress() - before, 0)
        with self._typed_errors(save, encoded.file_bytes):
            save.written = written = self._caller.run(request, time.monotonic() + self._timeouts.write)
        began, synced_from = written["began"], written["synced_from"]
        save.mark("queue", snapshot.staged_at, began)
        save.mark("write", began, synced_from)
        save.mark("sync", synced_from, began + written["seconds"])
        self._events.progressed(save.describe("written"))
        if options.io == "auto" and written["io"] != "auto":
            self._fastest_io[device] = written["io"]
            logger.info("checkpoint.writer.io=auto: %s, which a trial found to be faster there", written["io"])
        logger.info(
            "%s written: %s in %.2f s (%s)",
            os.path.basename(attempt.target),
            amount(written["bytes"]),
            written["seconds"],
            rate(written["bytes"] / max(written["seconds"], 1e-9)),
        )
        return written

    def _note_staged(self, save: PendingSave, snapshot: Snapshot) -> None:
        save.mark("plan", save.started, snapshot.planned_at or snapshot.began_at)
        if snapshot.planned_at:
            save.mark("memory", snapshot.planned_at, snapshot.began_at)
        save.mark("stage", snapshot.began_at, snapshot.staged_at)
        size, seconds = amount(snapshot.layout.payload_bytes), save.spans["stage"][1]
        logger.info("%s staged: %s in %.3f s", os.path.basename(save.path), size, seconds)
        self._events.progressed(save.describe("staged"))

    def _fields(self, save: PendingSave) -> dict[str, Any]:
        """What the manifest says besides the files."""
        of_run = {} if self._hooks is None else self._hooks.manifest_fields
        return {**self._manifest_fields, **of_run, **save.manifest_fields}

    def _publish(self, save: PendingSave, votes: Sequence[Mapping[str, Any]]) -> int:
        """On the leading rank: commit what all ranks have written. Returns the checkpoint's number of files."""
        fields = self._fields(save)
        with self._typed_errors(save, sum(map(len, self._sidecars.values()))):
            visible = self._timeouts.visible
            return commit.publish(save.attempt, votes, self._sidecars, fields, visible)

    @contextlib.contextmanager
    def _typed_errors(self, save: PendingSave, needed: int) -> Iterator[None]:
        """Turn file system errors into typed ones; for a full disk the text has the numbers.

        Raises CheckpointFencedError if another run has taken over the root, and may have deleted this run's files.
        """
        try:
            yield
        except (CheckpointSaveError, OSError) as error:
            if self._leads and self._hooks is not None:
                self._hooks.ownership.check_after(error)
            typed = isinstance(error, CheckpointSaveError)
            if error.errno in FULL and not isinstance(error, CheckpointStorageFullError):
                text = str(error) if typed else f"{save.path} could not be saved: {error}."
                numbers = full_text(save.fs, save.path, needed, error.errno)
                full = CheckpointStorageFullError(f"{text} {numbers}", error.errno)
                raise full from (error.__cause__ if typed else error)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointSaveError(f"{save.path} could not be saved: {error}.", error.errno) from error


def notify(hook: Callable[[SaveReport], None], report: SaveReport) -> None:
    """Call a hook for a committed checkpoint; an exception is only logged."""
    try:
        hook(report)
    except Exception:
        logger.exception("%s is committed, but a hook after the commit failed", report.path)
