"""What the listeners for experiment trackers share: the figures of a save, and what to install."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from typing import Any, ClassVar

from ..errors import CheckpointConfigError
from .listener import CheckpointListener
from .reports import LoadReport, SaveReport


def imported(module: str, package: str) -> Any:
    """Import the package of a listener.

    Raises:
        CheckpointConfigError: it is not installed
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CheckpointConfigError(
            f"A listener of checkpoint.listeners needs {package}, which cannot be imported ({error}): "
            f"pip install {package}"
        ) from error


class Tracker(CheckpointListener):
    """Logs figures of saves and restores by step, on rank 0."""

    every_rank: ClassVar[bool] = False

    def __init__(self) -> None:
        self._saves = 0

    @abstractmethod
    def log(self, figures: dict[str, float], step: int, time: float, path: str) -> None:
        """Log numbers by name.

        Args:
            figures: the numbers; names begin with `checkpoint/`
            step: the training step; for saves path by path, how many there were
            time: of the event, seconds since 1970
            path: the checkpoint
        """

    def on_committed(self, report: SaveReport) -> None:
        """Log what the save took."""
        figures = {"stall_s": report.stall_s, "lost_s": report.lost_s, "staged_s": report.staged_s}
        if report.memory:
            self._log({**figures, "whole_s": report.committed_s}, report)
            return
        figures |= {
            "durable_s": report.committed_s,
            "gbps": report.write_gbps,
            "bytes": report.bytes,
            "reused": report.reused,
            "attempts": report.attempts,
        }
        self._log(figures, report)

    def on_failed(self, report: SaveReport) -> None:
        """Log that the save failed or was skipped."""
        self._log({report.outcome: 1.0}, report)

    def on_restored(self, report: LoadReport) -> None:
        """Log how long the load took."""
        self._log({"restore_s": report.seconds, "restored_step": report.step or 0}, report)

    def _log(self, figures: dict[str, float], report: SaveReport | LoadReport) -> None:
        self._saves += isinstance(report, SaveReport)
        step = self._saves if report.step is None else report.step
        group = "checkpoint/memory_" if isinstance(report, SaveReport) and report.memory else "checkpoint/"
        named = {f"{group}{name}": float(value) for name, value in figures.items()}
        end = report.committed_s if isinstance(report, SaveReport) else report.seconds
        self.log(named, step, report.time + end, report.path)
