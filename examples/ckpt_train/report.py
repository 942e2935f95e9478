"""The figures of a run, for its `result.json` and for a sweeper."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_component.cli.reports.sweep_figures import figures_of
from ckpt_component.core.commit.run_record import stored_metrics
from ckpt_component.errors import CheckpointError

if TYPE_CHECKING:
    import signal

    import torch

    from ckpt_component.events.reports import SaveReport

logger = logging.getLogger(__name__)


@dataclass
class Summary:
    """The summary of a run.

    Attributes:
        start: the step it resumed from, or 0
        step: the last completed step
        step_s: mean duration of a step, without waits for checkpoints
        fence_s: how long optimizer steps waited for snapshots to be copied
        losses: (step, mean training loss since the previous entry), as logged
        validation: (step, validation loss)
        stopped_by: the signal that ended the run early
        leave: ends the process with an exit code for its scheduler, if a signal ended the run
        reports: one report per save
        earlier: the saves of a job of a sweep before it was interrupted
    """

    start: int = 0
    step: int = 0
    step_s: float | None = None
    fence_s: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    stopped_by: signal.Signals | None = None
    leave: Callable[[], None] = lambda: None
    reports: list[SaveReport] = field(default_factory=list)
    earlier: Sequence[SaveReport] = ()

    def take_metrics(self, path: str) -> None:
        """Take the losses of a run that trained nothing from its last checkpoint."""
        try:
            metrics = stored_metrics(path)
        except CheckpointError as error:
            logger.info("the losses of step %d are unknown: %s", self.step, error)
            return
        for name, values in (("loss", self.losses), ("validation_loss", self.validation)):
            if name in metrics:
                values.append((self.step, metrics[name]))

    def figures(self) -> dict[str, Any]:
        """The summary as plain data, for `result.json`."""
        return {
            **figures_of(self.reports, self.fence_s, self.earlier),
            "step_s": self.step_s,
            "start": self.start,
            "step": self.step,
            "loss": self.losses[-1][1] if self.losses else None,
            "validation_loss": self.validation[-1][1] if self.validation else None,
            "saves": sum(report.outcome == "committed" for report in self.reports) + len(self.earlier),
        }


class Stopwatch:
    """Adds up the time spent in its `with` blocks.

    Attributes:
        seconds: the sum so far
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


def time_fence(optimizer: torch.optim.Optimizer, guard: Callable[[torch.optim.Optimizer], None]) -> Stopwatch:
    """Guard an optimizer, and time how long its steps wait at the fence of `zero_overhead`.

    Args:
        optimizer: the optimizer to guard
        guard: function that registers the fence, such as `manager.guard`
    """
    watch = Stopwatch()
    optimizer.register_step_pre_hook(lambda *_: watch.__enter__())  # hooks run in the order of registration
    guard(optimizer)
    optimizer.register_step_pre_hook(lambda *_: watch.__exit__())
    return watch
