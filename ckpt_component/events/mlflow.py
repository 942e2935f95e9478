"""Saves and restores as metrics of an MLflow run."""

from __future__ import annotations

from ..errors import CheckpointConfigError
from .listener import Tracker, imported


class MlflowListener(Tracker):
    """Logs `checkpoint/stall_s` and others, by step, on rank 0.

    Args:
        run_id: the run; None: the one that is active in this thread when the listener is made

    Raises:
        CheckpointConfigError: mlflow is not installed
    """

    def __init__(self, run_id: str | None = None) -> None:
        super().__init__()
        self._mlflow = imported("mlflow", "mlflow")
        # MLflow has an active run per thread, and listeners are called on another one.
        active = None if run_id is not None else self._mlflow.active_run()
        self._run_id = run_id if active is None else active.info.run_id

    def log(self, figures: dict[str, float], step: int, time: float, path: str) -> None:
        """Log all figures with one request."""
        if self._run_id is None:
            raise CheckpointConfigError("no run is active; call mlflow.start_run() first")
        metric = self._mlflow.entities.Metric
        metrics = [metric(name, value, int(time * 1000), step) for name, value in figures.items()]
        self._mlflow.MlflowClient().log_batch(self._run_id, metrics)
