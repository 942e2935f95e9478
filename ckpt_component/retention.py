"""What follows a commit: the pointer to the newest checkpoint, and the end of those that need not be kept."""

from __future__ import annotations

import logging
import os

from .policies import KeepPolicy
from .storage.debris import discard
from .storage.fs import FsOps
from .storage.names import StepNames
from .storage.scan import committed_steps, write_pointer

logger = logging.getLogger(__name__)


class Retention:
    """Keeps one run's folder of checkpoints in order; on rank 0 alone.

    Args:
        fs: where effects go.
        root: folder of the run's checkpoints.
        names: how steps are named on disk.
        keep: what to keep.
    """

    def __init__(self, fs: FsOps, root: str, names: StepNames, keep: KeepPolicy) -> None:
        self._fs = fs
        self._root = root
        self._names = names
        self._keep = keep

    def after_commit(self, path: str) -> None:
        """The pointer, and what may go. A failure here is a warning: the checkpoint itself is committed."""
        step = self._names.step(os.path.basename(path))
        if step is None:
            return
        try:
            write_pointer(self._fs, self._root, self._names, step)
        except OSError as error:
            logger.warning("step %d is committed, but its pointer file could not be written: %s", step, error)
        try:
            # Also then: on a full disk this is what makes room.
            for victim in self._keep.victims(committed_steps(self._fs, self._root, self._names)):
                logger.info("deleting the checkpoint of step %d (checkpoint.keep)", victim)
                discard(self._fs, os.path.join(self._root, self._names.folder(victim)))
        except OSError as error:
            logger.warning("step %d is committed, but older ones could not be looked through: %s", step, error)
