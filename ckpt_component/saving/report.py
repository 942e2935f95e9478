"""The report of one save."""

from __future__ import annotations

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
