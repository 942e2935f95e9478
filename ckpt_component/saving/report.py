"""What a save tells: its report, its future, and the deadlines that it keeps."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass


@dataclass(frozen=True)
class SaveReport:
    """What became of one save. Times are seconds from the call of `save`.

    Attributes:
        path: the checkpoint's path.
        outcome: `committed`, `failed`, or `skipped` (by `overlap: skip`, or by `max_stall_s` with `on_error: warn`).
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
        attempts: how often it was tried, with `on_error: retry`.
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
    attempts: int = 1

    @property
    def write_gbps(self) -> float:
        """Gigabytes (1e9) per second of the writing."""
        return self.bytes / 1e9 / self.write_s if self.write_s > 0 else 0.0


class SaveFuture(Future[SaveReport]):
    """The future of one save.

    Attributes:
        path: the checkpoint's path.
        number: counts the saves of a checkpointer, alike on all ranks.
        delivered: the save's error has reached somebody: it was asked for, or it was logged and that is enough.
        tolerated: the save failed, and nobody is told who does not ask (`on_error: warn`).
        outcome: of the save in a report when it has an error: `failed` or `skipped`.
        begun: False when nothing was copied, because the save could not begin.
    """

    def __init__(self, path: str, number: int = 0) -> None:
        super().__init__()
        self.path = path
        self.number = number
        self.delivered = False
        self.tolerated = False
        self.outcome = "failed"
        self.begun = True

    def fail(self, error: BaseException, *, tolerated: bool, outcome: str) -> None:
        """End the future with an error.

        Args:
            error: of the save.
            tolerated: see the attribute.
            outcome: see the attribute.
        """
        self.tolerated = self.delivered = tolerated
        self.outcome = outcome
        self.set_exception(error)

    def report(self) -> SaveReport:
        """What became of the save, which is over; does not count as having told its error."""
        error = Future.exception(self, timeout=0)
        if error is None:
            return Future.result(self, timeout=0)
        return SaveReport(path=self.path, outcome=self.outcome, error=str(error))

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
    """Deadlines in seconds, from `timeouts.*` and `max_stall_s`.

    Attributes:
        max_stall: how long a save may keep training waiting; None: as long as the phases may take.
        again: what all further tries of a save may take, pauses included.
    """

    worker_start: float = 30.0
    stage: float = 300.0
    write: float = 1800.0
    close: float = 60.0
    heartbeat: float = 30.0
    stall: float = 300.0
    visible: float = 60.0
    max_stall: float | None = None
    again: float = 0.0

    @property
    def whole_save(self) -> float:
        """What a save may take from its snapshot to its commit, with all tries."""
        return self.stage + self.write + self.again

    @property
    def waiting(self) -> float:
        """How long the call of a save may wait for other ranks and for earlier saves."""
        return self.stage if self.max_stall is None else min(self.stage, self.max_stall)
