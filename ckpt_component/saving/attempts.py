"""One attempt to make a checkpoint: staging folder, this rank's write, the vote of all ranks, the commit.

It runs on the save thread. Every step goes through the coordinator, so that all ranks get the same decision.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from ..callers.write_callers import WriteCaller
from ..core.commit import commit
from ..core.commit.liveness import AttemptLock
from ..core.commit.protocol import Attempt
from ..core.image.unchanged_files import SharedFile
from ..core.options import OnDifferentReplicas
from ..core.processes.running import refuse_at_exit
from ..core.progress import no_progress
from ..core.storage.space import FULL, amount, full_text, rate, refuse_without_room
from ..core.writing.request import ReusedFile, WriteRequest
from ..errors import (
    CheckpointError,
    CheckpointSaveError,
    CheckpointStorageFullError,
    CheckpointTimeoutError,
    describe_error,
    ranks_failed,
)
from ..formats.writer import Writer
from ..state.compare import ReplicaDifference, differing
from .context import Committed, SaveContext, SaveRequest, Staged, Written, report_of
from .planning import RankIndexes
from .replica_comparison import raise_different

logger = logging.getLogger(__name__)

#: A shorter wait for memory is not logged, in seconds.
_SHOWN_WAIT = 0.05


class SaveAttempts:
    """Makes attempts, one after the other.

    Args:
        caller: who runs the write request
        writer: the format
        context: what is the same for all saves
    """

    def __init__(self, caller: WriteCaller, writer: Writer, context: SaveContext) -> None:
        self._caller = caller
        self._writer = writer
        self._context = context
        self._ranks = context.ranks
        self._leads = context.ranks.is_leader
        self._awaits_folder = not self._leads and 0 not in context.unseen
        self._timeouts = context.timeouts
        self._outside = context.ranks.outside
        self._run = context.run
        self._claim = context.run.ownership.acquire
        self._queue = context.queue
        self._indexes = RankIndexes(writer, context.run.files)
        #: By device: the faster I/O mode, where a request has made a trial.
        self._fastest_io: dict[int, str] = {}
        self._shows_progress = context.progress is not no_progress
        self._has_warned_of_copies = False
        #: The attempt that was written last, and what `progress` of the caller was before.
        self._writing = ("", 0)

    def written_by(self, token: str) -> int:
        """How many bytes this rank has written so far in the attempts at a save; `token`: of the first."""
        current, before = self._writing
        return max(self._caller.progress() - before, 0) if current.startswith(token) else 0

    def warn_of(self, path: str, error: BaseException) -> None:
        """Log a failed save after which training continues."""
        reason = self._context.policy.reason
        logger.warning("%s was not saved, and training continues (%s): %s", path, reason, error)

    def run(self, staged: Staged, attempt: Attempt, number: int) -> Committed:
        """Write and commit; returns when the checkpoint is committed, on all ranks.

        Args:
            staged: what this rank writes
            attempt: the attempt; the first one or a later one
            number: which it is, from 1

        Raises:
            CheckpointError: the attempt failed, and nothing became visible; the same error on all ranks
        """
        request, ranks, tag, own = staged.admitted.request, self._ranks, self._queue + attempt.token, list[Written]()
        # What the manifest says besides the files.
        fields = {"format": self._writer.format, **self._run.manifest_fields, **staged.admitted.manifest_fields}
        deadline = self._outside.now() + self._timeouts.stage + self._timeouts.write
        snapshot = staged.snapshot

        def write() -> Mapping[str, Any]:
            own.append(self._write(staged, attempt, number, fields))
            return own[0].result

        with contextlib.ExitStack() as locks:
            try:
                self._begin(staged, attempt, locks, deadline)
                votes = ranks.all_succeed(f"{tag}/written", write, self._caller.progress, deadline)
                voted = perf_counter()
                publish = partial(self._publish, request, attempt, votes, fields)
                files = ranks.run_on_leader(f"{tag}/commit", publish, deadline)
            except BaseException:
                # First the writer process forgets the save, so that it does not commit what is being deleted.
                self._caller.settle()
                self._indexes.forget()
                if snapshot is not None and snapshot.unchanged is not None:
                    self._context.reuse.failed(snapshot.unchanged)
                if self._leads:
                    commit.abandon(attempt)
                raise
            self._caller.settle()
        if snapshot is not None and snapshot.unchanged is not None:
            folder = attempt.protocol.files_of(attempt)
            self._context.reuse.committed(snapshot.unchanged, request.storage, folder, own[0].result)
        committed = Committed(own[0], files, voted)
        name, level = os.path.basename(request.path), logging.INFO if request.is_told else logging.DEBUG
        logger.log(level, "%s committed after %.2f s", name, committed.ended - request.started)
        return committed

    def _begin(self, staged: Staged, attempt: Attempt, locks: contextlib.ExitStack, deadline: float) -> None:
        """Send what this rank is going to write; the leading rank makes the staging folder and compares replicas."""
        snapshot = staged.snapshot
        if snapshot is None:
            error = staged.error or CheckpointSaveError("there is no snapshot")
            message: dict[str, Any] = {"error": describe_error(error), "cause": type(error).__name__}
        else:
            shared = 0 if snapshot.unchanged is None else snapshot.unchanged.likely_bytes
            message = {"bytes": snapshot.encoded.file_bytes - shared, **self._indexes.message(snapshot.encoded)}
            if staged.comparison is not None:
                message["digests"] = staged.comparison.message()
        make_folder = partial(self._make_folder, staged.admitted.request, attempt, locks)
        different = self._ranks.decide(f"{self._queue}{attempt.token}/begin", message, make_folder, deadline)
        differences = [ReplicaDifference(*each) for each in different]
        texts = [] if staged.comparison is None else staged.comparison.report(differences)
        if differences and self._context.settings.on_different_replicas is OnDifferentReplicas.error:
            tag = f"{self._queue}{attempt.token}/replicas"
            self._ranks.decide(tag, texts, partial(raise_different, attempt.target), deadline)

    def _make_folder(
        self, request: SaveRequest, attempt: Attempt, locks: contextlib.ExitStack, messages: Sequence[Mapping[str, Any]]
    ) -> list[ReplicaDifference]:
        """On the leading rank: make the staging folder. Returns which shared values differ by rank."""
        failures, causes, tables, needed = dict[int, str](), dict[int, str](), list[int](), 0
        for rank, message in enumerate(messages):
            if "error" in message:
                failures[rank], causes[rank] = message["error"], message["cause"]
            else:
                tables.append(message["table"])
                needed += message["bytes"]
        if failures:
            raise ranks_failed(failures, causes=causes)
        # Before the write: rank 0's writer process may have to commit if the trainers die.
        self._indexes.collect(tables, messages)
        with self._typed_errors(request, needed):
            self._claim()  # also deletes what an earlier run left
            self._refuse_without_room(request, needed)
            commit.begin(attempt)
            locks.callback(AttemptLock(request.storage, attempt).close)
        return differing([message.get("digests", {}) for message in messages]) if len(messages) > 1 else []

    def _refuse_without_room(self, request: SaveRequest, needed: int) -> None:
        margin = self._context.policy.min_free_bytes
        if margin is None:
            return
        try:
            refuse_without_room(request.storage, request.path, needed, margin)
        except CheckpointStorageFullError:
            self._run.make_room()
            refuse_without_room(request.storage, request.path, needed, margin)

    def _write(self, staged: Staged, attempt: Attempt, number: int, fields: Mapping[str, Any]) -> Written:
        """Write this rank's files once its snapshot is complete."""
        request, snapshot, options = staged.admitted.request, staged.snapshot, self._writer.options
        if snapshot is None:
            raise CheckpointSaveError(f"{attempt.target} was begun without a snapshot of this rank.")
        encoded, storage, events = snapshot.encoded, request.storage, self._context.events
        name, tells = os.path.basename(request.path), events.has_listeners and request.is_told
        level = logging.INFO if request.is_told else logging.DEBUG
        if self._awaits_folder:
            attempt.protocol.join(attempt, self._timeouts.visible)
        if not self._outside.wait_for([snapshot.staged], self._timeouts.stage):
            raise CheckpointTimeoutError(
                f"The snapshot for {request.path} was not complete after {self._timeouts.stage:g} s (timeouts.stage)."
            )
        snapshot.staged.result(0)  # raises the error of a failed snapshot
        if number == 1:
            waited = snapshot.began_at - snapshot.planned_at if snapshot.planned_at else 0.0
            seconds = snapshot.staged_at - request.started - waited
            after = f", after waiting {waited:.2f} s for memory" if waited >= _SHOWN_WAIT else ""
            size = amount(snapshot.layout.payload_bytes)
            logger.log(level, "%s staged: %s in %.3f s%s", name, size, seconds, after)
            if tells:
                events.progressed(report_of(request, "staged", staged))
        unchanged, shared = snapshot.unchanged, list[SharedFile]()
        if unchanged is not None:
            shared = self._context.reuse.settle(unchanged, snapshot.source.buffers, storage)
        device = -1
        if options.io == "auto":
            device = storage.device(os.path.dirname(attempt.target))
            options = replace(options, io=self._fastest_io.get(device, "auto"))
        job = WriteRequest(
            storage,
            attempt,
            self._ranks.rank,
            self._ranks.world_size,
            encoded.table,
            encoded.object_blobs,
            snapshot.source,
            options,
            fields,
            self._timeouts,
            self._indexes.sidecars,
            [ReusedFile(*each) for each in shared],
            () if unchanged is None else list(unchanged.items),
            not self._context.unseen,
        )
        if self._shows_progress:
            self._writing = attempt.token, self._caller.progress()
        with self._typed_errors(request, encoded.file_bytes):
            result = self._caller.run(job, self._outside.now() + self._timeouts.write)
        self._outside.wait_for([snapshot.copied], self._timeouts.stage)
        snapshot.copied.result(0)  # raises if a tensor changed during the copy
        written = Written(result, number)
        if tells:
            events.progressed(report_of(request, "written", staged, written))
        if options.io == "auto" and result["io"] != "auto":
            self._fastest_io[device] = result["io"]
            logger.info("checkpoint.writer.io=auto: %s, which a trial found to be faster there", result["io"])
        size, speed = amount(result["bytes"]), rate(result["bytes"] / max(result["seconds"], 1e-9))
        reused = f", and {amount(result['shared'])} are shared" if result["shared"] else ""
        text = "%s written: %s in %.2f s (%s)%s"
        logger.log(level, text, name, size, result["seconds"], speed, reused)
        if result["copied"] and not self._has_warned_of_copies:
            self._has_warned_of_copies = True
            text = "%s: %s did not change but were copied: a hard link was refused, or no checkpoint has them any more"
            logger.warning(text, name, amount(sum(encoded.table.files[file].size for file in result["copied"])))
        return written

    def _publish(
        self, request: SaveRequest, attempt: Attempt, votes: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]
    ) -> int:
        """On the leading rank: commit what all ranks have written. Returns the checkpoint's number of files."""
        sidecars = self._indexes.sidecars
        with self._typed_errors(request, sum(map(len, sidecars.values()))):
            return commit.publish(attempt, votes, sidecars, fields, self._timeouts.visible, self._context.unseen)

    @contextlib.contextmanager
    def _typed_errors(self, request: SaveRequest, needed: int) -> Iterator[None]:
        """Turn errors of the file system and the interpreter into typed ones; for a full disk the text has the numbers.

        Raises CheckpointFencedError if another run has taken over the root, and may have deleted this run's files.
        """
        try:
            yield
        except (CheckpointSaveError, OSError) as error:
            if self._leads:
                self._run.ownership.check_after(error)
            typed = isinstance(error, CheckpointSaveError)
            if error.errno in FULL and not isinstance(error, CheckpointStorageFullError):
                text = str(error) if typed else f"{request.path} could not be saved: {error}."
                numbers = full_text(request.storage, request.path, needed, error.errno)
                full = CheckpointStorageFullError(f"{text} {numbers}", error.errno)
                raise full from (error.__cause__ if typed else error)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointSaveError(f"{request.path} could not be saved: {error}.", error.errno) from error
        except RuntimeError as error:
            refuse_at_exit(error)
            raise
