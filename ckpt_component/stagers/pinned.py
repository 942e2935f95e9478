"""`pinned`: awaited copies into a page-locked arena, the fastest way off a CUDA device."""

from __future__ import annotations

import logging
from typing import ClassVar

import torch

from ..image.arena import Arena
from .arena_stager import Filling
from .shared_memory import SharedMemoryStager

logger = logging.getLogger(__name__)


class PageLock:
    """Page-locks an arena when tensors come from CUDA; says once when there is nothing to lock for."""

    def __init__(self, stager: str) -> None:
        self._stager = stager
        self._said = False

    def apply(self, arena: Arena, device: torch.device | None) -> None:
        """Lock an arena that is filled from `device`; the second time it is locked already."""
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

    def _warm(self, filling: Filling) -> None:
        self._page_lock.apply(filling.arena, self._plan_of(filling).device)
        super()._warm(filling)
