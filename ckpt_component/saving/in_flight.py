"""A save from its call to its end, and the list of saves in flight."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from typing import Any, TypeVar

from ..core.commit.protocol import Attempt
from ..core.progress import Progress, no_progress
from ..core.storage.storage import Storage
from ..errors import CheckpointTimeoutError, RanksError
from ..events.records import SaveReport, Span
from ..stagers.base import Snapshot

#: How often progress is shown.
_POLL_SECONDS = 0.2

_Result = TypeVar("_Result")


class SaveFuture(Future[_Result]):
    """A future that knows whether its error was delivered, so that no error is lost and none is raised twice.

    Attributes:
        delivered: the error was raised or retrieved, or was logged and need not be raised.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.delivered = False

    @property
    def undelivered(self) -> BaseException | None:
        """The error of a failed save until it is delivered, else None."""
        return None if self.delivered or not self.done() else super().exception(0)

    def result(self, timeout: float | None = None) -> _Result:
        """Return the result, or raise the save's error."""
        try:
            return super().result(timeout)
        except BaseException:
            self.delivered = self.done()
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the save's error, or None."""
        error = super().exception(timeout)
        self.delivered = True
        return error


class PendingSave(SaveFuture[SaveReport]):
    """One save: the future that the caller of `save` holds, and what the save thread needs.

    Args:
        path: absolute path of the checkpoint.
        fs: its storage.
        step: the training step, if a manager saves.
        metrics: numbers by name, such as a validation loss, as the caller passed them.

    Attributes:
        manifest_fields: plain values for the manifest, beside those of all saves; on rank 0 they are written.
        number: number of the save in its checkpointer, the same on all ranks.
        started: when it began (`time.perf_counter`).
        time: the same, seconds since 1970.
        stall_s: how long the call took.
        token: identifies the save; the same on all ranks.
        attempt: the current attempt; its token is that of the save, or derived from it.
        attempts: number of attempts so far.
        snapshot: what this rank writes; None if it could not be taken, and once the save has ended.
        error: why this rank has no snapshot.
        written: what this rank wrote.
        written_now: returns the bytes that this rank has written so far.
        files: number of the checkpoint's files, once it is committed.
        items: number of tensors and objects that this rank stores.
        host_bytes: host memory that this rank held for snapshots when the attempt began.
        spans: when the phases so far began and ended, in seconds since `started`.
        begun: False if nothing was copied, because the save could not begin.
        report: set when the save ends.
    """

    attempt: Attempt
    report: SaveReport

    def __init__(
        self, path: str, fs: Storage, step: int | None = None, metrics: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.path = path
        self.fs = fs
        self.step = step
        self.metrics = metrics
        self.manifest_fields: Mapping[str, Any] = {}
        self.number = 0
        self.started, self.time = time.perf_counter(), time.time()
        self.stall_s = 0.0
        self.token = ""
        self.attempts = 1
        self.snapshot: Snapshot | None = None
        self.error: Exception | None = None
        self.written: Mapping[str, Any] = {}
        self.written_now: Callable[[], int] = lambda: 0
        self.files = self.items = self.host_bytes = 0
        self.spans: dict[str, Span] = {}
        self.begun = True

    def mark(self, phase: str, began: float, ended: float) -> None:
        """Note when a phase began and ended (`time.perf_counter`)."""
        self.spans[phase] = (began - self.started, max(ended, began) - self.started)

    def describe(self, outcome: str, error: str | None = None) -> SaveReport:
        """The report of what is known by now."""
        ends = {phase: end for phase, (_, end) in self.spans.items()}
        return SaveReport(
            path=self.path,
            outcome=outcome,
            step=self.step,
            error=error,
            bytes=self.written.get("bytes", 0),
            files=self.files,
            items=self.items,
            stall_s=self.stall_s,
            staged_s=ends.get("stage", 0.0),
            written_s=ends.get("vote", 0.0),
            committed_s=ends.get("commit", 0.0),
            write_s=self.written.get("seconds", 0.0),
            attempts=self.attempts,
            time=self.time,
            spans=dict(self.spans),
            lost_s=self.stall_s,
            host_memory_bytes=self.host_bytes,
        )

    def release(self) -> None:
        """Release the snapshot's memory."""
        snapshot, self.snapshot = self.snapshot, None
        if snapshot is not None:
            snapshot.release()


class InFlightSaves(list[PendingSave]):
    """Running saves, and failed ones whose error was not raised yet, in order; `drop_ended` drops the others.

    Args:
        progress: follows the bytes of saves that are waited for.
    """

    def __init__(self, progress: Progress = no_progress) -> None:
        super().__init__()
        self._progress = progress

    def drop_ended(self) -> list[tuple[int, str]]:
        """Drop ended saves, except those whose error was not raised yet; return their numbers and error texts."""
        failed = []
        for save in list(self):
            if not save.done():
                continue
            error = save.undelivered
            if error is None:
                self.remove(save)
            else:
                failed.append((save.number, str(error)))
        return failed

    def error_of(self, number: int, text: str, timeout: float) -> BaseException:
        """Return the error of a save that another rank reports as failed; waits until it fails on this rank too."""
        for save in self:
            if save.number == number:
                save.delivered = True
                try:
                    return save.exception(timeout) or RanksError(text)
                except TimeoutError:
                    break
        return RanksError(text)

    def raise_first(self) -> None:
        """Raise the first error that was not raised yet."""
        for save in self:
            if save.undelivered is not None:
                save.result(0)

    def wait(self, limit: float) -> None:
        """Wait until all saves have ended, successfully or not.

        Args:
            limit: seconds for each.

        Raises:
            CheckpointTimeoutError: a save is still running.
        """
        running = [save for save in self if not save.done()]
        deadline = time.monotonic() + limit * len(running)
        for save in running:
            if not self.follow(save, deadline):
                raise CheckpointTimeoutError(
                    f"A save was still running after {limit:g} s; see timeouts.stage and timeouts.write."
                )

    def follow(self, save: PendingSave, deadline: float = math.inf) -> bool:
        """Wait until a save has ended, and report its progress.

        Args:
            save: the save.
            deadline: when to stop waiting (`time.monotonic`).

        Returns:
            False if it is still running.
        """
        snapshot, shown = save.snapshot, 0  # the save thread may release it at any time
        total = 0 if snapshot is None else snapshot.encoded.file_bytes
        with self._progress(f"saving {os.path.basename(save.path)}", total) as advance:
            while wait_futures([save], min(deadline - time.monotonic(), _POLL_SECONDS)).not_done:
                if time.monotonic() >= deadline:
                    return False
                written = min(save.written_now(), total)  # the process writes more than the files
                advance(written - shown)
                shown = written
        return True
