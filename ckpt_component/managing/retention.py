"""After a commit: the pointer to the newest checkpoint is set, and checkpoints that `keep` has no room for go."""

from __future__ import annotations

import logging
import os

from ..storage.fs import FsOps
from ..storage.layout import discard
from ..storage.names import StepNames
from ..storage.scan import committed_steps, write_pointer
from .policies import KeepPolicy

logger = logging.getLogger(__name__)


class Retention:
    """Keeps one run's folder of checkpoints in order; on rank 0 alone.

    Args:
        fs: where effects go.
        root: folder of the run's checkpoints.
        names: how steps are named on disk.
        keep: what to keep.
        warned: what was warned about already; see `committed_steps`.
    """

    def __init__(self, fs: FsOps, root: str, names: StepNames, keep: KeepPolicy, warned: set[str]) -> None:
        self._fs = fs
        self._root = root
        self._names = names
        self._keep = keep
        self._warned = warned

    def point_to(self, path: str) -> None:
        """Set the pointer to a new checkpoint. A failure is a warning: the checkpoint itself is committed."""
        step = self._names.step(os.path.basename(path))
        if step is None:
            return
        try:
            write_pointer(self._fs, self._root, self._names, step)
        except OSError as error:
            logger.warning("step %d is committed, but its pointer file could not be written: %s", step, error)

    def delete_old(self, path: str) -> None:
        """Delete what `keep` has no room for beside a new checkpoint; a failure is a warning."""
        step = self._names.step(os.path.basename(path))
        if step is None:
            return
        try:
            for victim in self._keep.victims(committed_steps(self._fs, self._root, self._names, self._warned)):
                logger.info("deleting the checkpoint of step %d (checkpoint.keep)", victim)
                discard(self._fs, os.path.join(self._root, self._names.folder(victim)))
        except OSError as error:
            logger.warning("step %d is committed, but older ones could not be looked through: %s", step, error)
