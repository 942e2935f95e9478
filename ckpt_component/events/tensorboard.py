"""Saves and restores as scalars of TensorBoard."""

from __future__ import annotations

import os
from typing import Any

from .event_file import FOLDER
from .tracker import Tracker, imported


class TensorBoardListener(Tracker):
    """Logs `checkpoint/stall_s` and others, by step, on rank 0.

    Args:
        log_dir: folder of the log; None: `events` in the folder of the checkpoints.
        writer: a `SummaryWriter` to use, which stays the caller's, instead of one for `log_dir`.

    Raises:
        CheckpointConfigError: tensorboard is not installed.
    """

    def __init__(self, log_dir: str | None = None, writer: Any = None) -> None:
        super().__init__()
        imported("tensorboard", "tensorboard")
        self._log_dir = log_dir
        self._writer = writer
        self._owned = writer is None

    def log(self, figures: dict[str, float], step: int, time: float, path: str) -> None:
        """Add a scalar for each figure."""
        if self._writer is None:
            log_dir = self._log_dir or os.path.join(os.path.dirname(os.path.abspath(path)), FOLDER)
            self._writer = imported("torch.utils.tensorboard", "tensorboard").SummaryWriter(log_dir)
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, walltime=time)
        self._writer.flush()

    def close(self) -> None:
        """Close the log, unless it is the caller's."""
        if self._owned and self._writer is not None:
            self._writer.close()
