"""After a commit: update the latest-pointer, and delete checkpoints that retention no longer keeps."""

from __future__ import annotations

import logging
import os

from ..storage.cleanup import discard
from ..storage.scan import write_pointer
from .policies import RetentionPolicy
from .run_context import RunContext

logger = logging.getLogger(__name__)


class Retention:
    """Keeps one run's folder of checkpoints in order; on rank 0 alone.

    Args:
        run: whose folder it is.
        policy: what to keep.
    """

    def __init__(self, run: RunContext, policy: RetentionPolicy) -> None:
        self._run = run
        self._policy = policy

    def point_to(self, path: str) -> None:
        """Set the pointer to a new checkpoint. A failure is a warning: the checkpoint itself is committed."""
        step = self._run.names.step(os.path.basename(path))
        if step is None:
            return
        try:
            write_pointer(self._run.fs, self._run.root, self._run.names, step)
        except OSError as error:
            logger.warning("step %d is committed, but its pointer file could not be written: %s", step, error)

    def delete_old(self, path: str) -> None:
        """Delete what the policy no longer keeps beside a new checkpoint. A failure is a warning."""
        step = self._run.names.step(os.path.basename(path))
        if step is None:
            return
        try:
            for old in self._policy.to_delete(self._run.committed()):
                logger.info("deleting the checkpoint of step %d (checkpoint.keep)", old)
                discard(self._run.fs, self._run.path_of(old))
        except OSError as error:
            logger.warning("step %d is committed, but listing or deleting older checkpoints failed: %s", step, error)
