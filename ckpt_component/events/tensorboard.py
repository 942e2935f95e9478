"""Saves and restores as scalars of TensorBoard."""

from __future__ import annotations

import logging
import os
from typing import Any

from ..core.storage.locate import is_url
from .event_file import FOLDER
from .listener import Tracker, imported

logger = logging.getLogger(__name__)


class TensorBoardListener(Tracker):
    """Logs `checkpoint/stall_s` and others, by step, on rank 0.

    Args:
        log_dir: folder of the log; None: `events` in the checkpoints' folder; for a bucket, in the working folder
        writer: a `SummaryWriter` to use, which stays the caller's, instead of one for `log_dir`

    Raises:
        CheckpointConfigError: tensorboard is not installed
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
            self._writer = imported("torch.utils.tensorboard", "tensorboard").SummaryWriter(self._folder_for(path))
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, walltime=time)
        self._writer.flush()

    def _folder_for(self, path: str) -> str:
        if self._log_dir is not None:
            return self._log_dir
        if not is_url(path):
            return os.path.join(os.path.dirname(os.path.abspath(path)), FOLDER)
        log_dir = os.path.abspath(FOLDER)
        logger.info("TensorBoard logs to %s, because the checkpoints are in a bucket; log_dir names another", log_dir)
        return log_dir

    def close(self) -> None:
        """Close the log, unless it is the caller's."""
        if self._owned and self._writer is not None:
            self._writer.close()
