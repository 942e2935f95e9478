"""`pinned`: awaited copies into a page-locked arena, the fastest way off a CUDA device."""

from __future__ import annotations

import logging
from typing import ClassVar

import torch

from ..image.arena import Arena
from .shared_memory import SharedMemoryStager

logger = logging.getLogger(__name__)


class PinnedStager(SharedMemoryStager):
    """As `shared_memory`, and the arena is page-locked where tensors come from CUDA.

    Args:
        arenas: how many saves may be in flight, each with its own copy of the state in host memory.
    """

    option: ClassVar[str] = "pinned"

    def __init__(self, arenas: int = 1) -> None:
        super().__init__(arenas)
        self._logged_pageable = False

    def _prepare(self, arena: Arena, device: torch.device | None) -> None:
        """Lock an arena that is filled from `device`; the second time it is locked already."""
        if device is not None:
            arena.page_lock(device)
        elif not self._logged_pageable:
            self._logged_pageable = True
            logger.info(
                "checkpoint/stager=%s: no tensor is on a CUDA device, so memory is not page-locked", self.option
            )
