"""The report of one save."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SaveReport:
    """The outcome of one save. Times are seconds since the call of `save`.

    Attributes:
        path: the checkpoint's path.
        outcome: `committed`, `failed`, or `skipped` (by `overlap: skip`, or by `max_stall_s` with `on_error: warn`).
        step: the training step, if a manager made the save.
        error: the error text of a failed or skipped save.
        bytes: written by this rank, in all files.
        files: number of files, including the manifest.
        items: number of tensors and objects stored; tied tensors count once.
        stall_s: how long the call blocked training.
        staged_s: when training could change the tensors again.
        written_s: when this rank's files were durable.
        committed_s: when the checkpoint was visible, on all ranks.
        write_s: how long the write itself took.
        attempts: number of attempts, with `on_error: retry`.
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
        """Write throughput in gigabytes (1e9 bytes) per second."""
        return self.bytes / 1e9 / self.write_s if self.write_s > 0 else 0.0
