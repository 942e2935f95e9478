"""Saves and restores as metrics of a Weights & Biases run."""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointConfigError
from .listener import Tracker, imported


class WandbListener(Tracker):
    """Logs `checkpoint/stall_s` and others, on rank 0, over the step metric `checkpoint/step`.

    The metrics become part of the script's next `run.log`, so that the run's own step does not advance.

    Args:
        run: the run; None: the one of `wandb.init()`

    Raises:
        CheckpointConfigError: wandb is not installed
    """

    def __init__(self, run: Any = None) -> None:
        super().__init__()
        self._wandb = imported("wandb", "wandb")
        self._run = run
        self._defined: Any = None

    def log(self, figures: dict[str, float], step: int, time: float, path: str) -> None:
        """Add the figures to the run's current row."""
        run = self._run or self._wandb.run
        if run is None:
            raise CheckpointConfigError("no run is active; call wandb.init() before the first save")
        if self._defined is not run:
            run.define_metric("checkpoint/step", hidden=True)
            run.define_metric("checkpoint/*", step_metric="checkpoint/step")
            self._defined = run
        run.log({**figures, "checkpoint/step": step}, commit=False)
