"""What a save tells: its report, its future, and the deadlines that it keeps."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass


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
    """The future of the save of `path`; `delivered` tells whether its error has reached somebody.

    `number` counts the saves of a checkpointer, alike on all ranks.
    """

    def __init__(self, path: str, number: int = 0) -> None:
        super().__init__()
        self.path = path
        self.number = number
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
    heartbeat: float = 30.0
    stall: float = 300.0
