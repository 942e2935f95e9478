"""The ranks of `torch.distributed` as they were at one moment, to notice later that they are others."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

from ..errors import CheckpointWorldError
from .rank_store import distributed

logger = logging.getLogger(__name__)


class World:
    """The default process group at the time this is built. Each rank compares by itself, without a message."""

    def __init__(self) -> None:
        group, self._size = _present()
        # Weak, so that destroy_process_group() is not held up.
        self._group = None if group is None else weakref.ref(group)
        self._warned = False

    def fault(self) -> str | None:
        """Why what was built then is of no use now; None where it is.

        After `destroy_process_group()` it still is: the ranks keep connections of their own to the store.
        """
        group, size = _present()
        if group is None or size == self._size == 1:
            return None
        if self._group is None:
            return (
                f"torch.distributed was initialized, with {size} ranks, after this manager or checkpointer was built, "
                "so each rank would save and load for itself; build it after init_process_group()."
            )
        if self._group() is not group:
            return (
                "The process group was destroyed and initialized again after this manager or checkpointer was built; "
                "build a new one after init_process_group()."
            )
        return None

    def check(self) -> None:
        """Raise CheckpointWorldError where there is a fault."""
        fault = self.fault()
        if fault is not None:
            raise CheckpointWorldError(fault)

    def warn_if_alone(self) -> None:
        """Log once that a launcher started several ranks, and they were never connected."""
        ranks = os.environ.get("WORLD_SIZE", "")
        if self._warned or _present()[0] is not None or not ranks.isdigit() or int(ranks) < 2:
            return
        self._warned = True
        logger.warning(
            "WORLD_SIZE is %s and torch.distributed is not initialized, so this rank (RANK=%s) saves and restores for "
            "itself. Ranks that train one model need init_process_group() before build_manager(); independent ones "
            "need a checkpoint.dir each.",
            ranks,
            os.environ.get("RANK"),
        )


def _present() -> tuple[Any, int]:
    """The default process group, or None, and how many ranks there are."""
    dist = distributed()
    return (None, 1) if dist is None else (dist.group.WORLD, int(dist.get_world_size()))
