"""A save from its call to its end, and the list of those that have not come to theirs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from typing import Any

from ..errors import CheckpointTimeoutError, RanksError
from ..stagers.base import Snapshot
from ..storage.names import Attempt
from .report import SaveReport


class PendingSave(Future[SaveReport]):
    """One save from its call to its end: the future that the caller of `save` holds, and what the save thread needs.

    Args:
        path: the checkpoint's, absolute.
        step: the training step, where a manager saves.

    Attributes:
        number: counts the saves of a checkpointer, alike on all ranks.
        started: when it began (`time.perf_counter`).
        stall_s: how long the call took.
        token: names the save, as all ranks agreed.
        attempt: the current one; its token is that of the save, or follows from it.
        attempts: how many there were so far.
        snapshot: what this rank writes; None when it could not be taken, and once the save has ended.
        error: why this rank has no snapshot.
        written: what this rank wrote.
        begun: False when nothing was copied, because the save could not begin.
        delivered: the error was raised or asked for, or it was logged and that is enough.
        report: once it has ended.
    """

    attempt: Attempt
    report: SaveReport

    def __init__(self, path: str, step: int | None = None) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.path = path
        self.step = step
        self.number = 0
        self.started = time.perf_counter()
        self.stall_s = 0.0
        self.token = ""
        self.attempts = 1
        self.snapshot: Snapshot | None = None
        self.error: Exception | None = None
        self.written: Mapping[str, Any] = {}
        self.begun = True
        self.delivered = False

    @property
    def undelivered(self) -> BaseException | None:
        """The error of a failed save, as long as nobody has seen it."""
        return None if self.delivered or not self.done() else super().exception(0)

    def release(self) -> None:
        """Give the snapshot's memory back."""
        snapshot, self.snapshot = self.snapshot, None
        if snapshot is not None:
            snapshot.release()

    def result(self, timeout: float | None = None) -> SaveReport:
        """The report, or the save's error raised."""
        try:
            return super().result(timeout)
        except BaseException:
            self.delivered = self.done()
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The save's error, or None."""
        error = super().exception(timeout)
        self.delivered = True
        return error


class InFlightSaves(list[PendingSave]):
    """The saves that run, or failed and their error was not raised yet, in order; `drop_ended` drops the others."""

    def drop_ended(self) -> list[tuple[int, str]]:
        """Drop what ended, except for errors that were not raised yet: their saves' numbers, and their texts."""
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
        """The error of a save that another rank knows to have failed: here the same decision is on its way."""
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
        """Return when all of them have ended, however they did.

        Args:
            limit: seconds for each.

        Raises:
            CheckpointTimeoutError: one of them hangs.
        """
        running = [save for save in self if not save.done()]
        if wait_futures(running, limit * len(running)).not_done:
            raise CheckpointTimeoutError(
                f"A save was still running after {limit:g} s; see timeouts.stage and timeouts.write."
            )
