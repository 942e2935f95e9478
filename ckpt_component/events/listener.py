"""The base class of listeners, which are called for saves and loads while a program trains."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from typing import Any, ClassVar

from ..errors import CheckpointConfigError
from .reports import LoadReport, SaveReport


class CheckpointListener:
    """Called for the saves and loads of a run. Derive from it, define what you need, and pass it to `add_listener`.

    The methods of a listener are called one after the other, in the order of the events, on its own thread. A slow
    method delays the later events of this listener, but neither training, nor a save, nor other listeners; a warning
    names one that takes longer than 10 s, and if more than 1,000 events wait, the newest are dropped with a warning. An
    exception, even `SystemExit`, is logged, once per listener, and ends nothing. `CheckpointManager.wait` and `close`
    return when the listeners have been called, or after `timeouts.close`; then they do not wait again.

    Attributes:
        every_rank: False: only the listener of rank 0 is called
    """

    every_rank: ClassVar[bool] = True

    def on_staged(self, report: SaveReport) -> None:
        """Training may change the tensors of a save again."""

    def on_written(self, report: SaveReport) -> None:
        """This rank's files of a save are durable; the ranks have not voted yet."""

    def on_committed(self, report: SaveReport) -> None:
        """A checkpoint is visible, on all ranks."""

    def on_failed(self, report: SaveReport) -> None:
        """A save failed or was skipped; `report.outcome` and `report.error` say why."""

    def on_at_peers(self, report: SaveReport) -> None:
        """The snapshot of a save has copies in the memory of other hosts (`checkpoint/recovery=peers`)."""

    def on_restored(self, report: LoadReport) -> None:
        """`CheckpointManager.restore` or `Checkpointer.load` has loaded a checkpoint."""

    def close(self) -> None:
        """The run is over; called once, after all others."""


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
