"""`pinned`: awaited copies into a page-locked arena, the fastest way off a CUDA device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar

import torch

from ..image.arena import Arena
from ..image.tree import FlatState
from .base import Snapshot
from .copying import cuda_device_of
from .shared_memory import SharedMemoryStager

logger = logging.getLogger(__name__)


class PageLock:
    """Page-locks an arena when tensors come from CUDA; says once when there is nothing to lock for."""

    def __init__(self, stager: str) -> None:
        self._stager = stager
        self._said = False

    def apply(self, arena: Arena, sources: Sequence[torch.Tensor]) -> None:
        """Lock the arena of one save; the second time it is locked already."""
        device = cuda_device_of(sources)
        if device is not None:
            arena.page_lock(device)
        elif not self._said:
            self._said = True
            logger.info(
                "checkpoint/stager=%s: no tensor is on a CUDA device, so memory is not page-locked", self._stager
            )


class PinnedStager(SharedMemoryStager):
    """As `shared_memory`, and the arena is page-locked where tensors come from CUDA.

    Args:
        arenas: how many saves may be in flight, each with its own copy of the state in host memory.
    """

    option: ClassVar[str] = "pinned"

    def __init__(self, arenas: int = 1) -> None:
        super().__init__(arenas)
        self._page_lock = PageLock("pinned")

    def _copy(
        self, snapshot: Snapshot, flat: FlatState, slots: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        if snapshot.arena is not None:
            self._page_lock.apply(snapshot.arena, sources)
        super()._copy(snapshot, flat, slots, sources)
