"""The end of a run: the table of its saves, and how long training waited for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..sweeps.figures import figures_of
from ..sweeps.text import aligned, duration

if TYPE_CHECKING:
    import signal

    import torch

    from ...saving.report import SaveReport

_COLUMNS = ("step", "stall", "staged", "written", "committed", "GB/s", "outcome")


@dataclass
class Summary:
    """One run in figures.

    Attributes:
        start: the step it resumed from, or 0.
        step: the last step done.
        seconds: wall time of training, from the first step to the end of the last save.
        saving_s: how long steps waited in calls of the manager.
        fence_s: how long optimizer steps waited for a snapshot that was being copied.
        closing_s: how long the end of the run waited: for a save of the last step, and for all to end.
        losses: (step, mean training loss since the one before), as reported.
        validation: (step, validation loss).
        stopped_by: the signal that ended the run early.
        reports: one per save.
    """

    start: int = 0
    step: int = 0
    seconds: float = 0.0
    saving_s: float = 0.0
    fence_s: float = 0.0
    closing_s: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    stopped_by: signal.Signals | None = None
    reports: list[SaveReport] = field(default_factory=list)

    @property
    def saves(self) -> list[SaveReport]:
        """The saves that were committed."""
        return [report for report in self.reports if report.outcome == "committed"]

    @property
    def waited_s(self) -> float:
        """How long the run stood still for checkpoints."""
        return self.saving_s + self.fence_s + self.closing_s

    @property
    def stall_per_save_s(self) -> float:
        """How long the call of a save and its fence kept training waiting, on average; 0 without saves."""
        saves = self.saves
        return (sum(report.stall_s for report in saves) + self.fence_s) / len(saves) if saves else 0.0

    def figures(self) -> dict[str, Any]:
        """The run as plain data, for `result.json`."""
        steps = self.step - self.start
        outcomes = [report.outcome for report in self.reports]
        return {
            **figures_of(self.reports, self.fence_s),
            "step_s": (self.seconds - self.waited_s) / steps if steps > 0 else None,
            "start": self.start,
            "step": self.step,
            "loss": self.losses[-1][1] if self.losses else None,
            "validation_loss": self.validation[-1][1] if self.validation else None,
            "seconds": self.seconds,
            "saves": outcomes.count("committed"),
            "failed_saves": outcomes.count("failed"),
            "skipped_saves": outcomes.count("skipped"),
            "stall_per_save_s": self.stall_per_save_s,
            "waited_s": self.waited_s,
        }


class Stopwatch:
    """Adds up the time of its `with` blocks.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


def time_fence(optimizer: torch.optim.Optimizer, guard: Callable[[torch.optim.Optimizer], None]) -> Stopwatch:
    """Guard an optimizer, and time how long its steps wait for that: the fence of `zero_overhead`.

    Args:
        optimizer: the one to be guarded.
        guard: registers the fence, such as `manager.guard`.
    """
    watch = Stopwatch()
    optimizer.register_step_pre_hook(lambda *_: watch.__enter__())  # hooks run in the order of registration
    guard(optimizer)
    optimizer.register_step_pre_hook(lambda *_: watch.__exit__())
    return watch


def table(reports: Sequence[SaveReport]) -> str:
    """The saves of a run, one a line; times are from the call of `save`."""
    rows: list[Sequence[str]] = [_COLUMNS]
    for report in reports:
        step = "-" if report.step is None else str(report.step)
        if report.outcome == "committed":
            times = (report.stall_s, report.staged_s, report.written_s, report.committed_s)
            rows.append((step, *map(duration, times), f"{report.write_gbps:.2f}", report.outcome))
        else:
            rows.append((step, "-", "-", "-", "-", "-", f"{report.outcome}: {report.error}"))
    return "\n".join(aligned(rows, left=[len(_COLUMNS) - 1]))


def waiting(summary: Summary) -> str:
    """How long training waited, in one line."""
    count = len(summary.saves)
    share = summary.waited_s / summary.seconds if summary.seconds else 0.0
    return (
        f"training waited {duration(summary.waited_s)} for {count} {'save' if count == 1 else 'saves'}, "
        f"{share:.2%} of {duration(summary.seconds)}; {duration(summary.closing_s)} of it at the end of the run"
    )
