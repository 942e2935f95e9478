"""Prepares the first save while training runs, so that it returns as soon as the next ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..stagers.base import Stager

logger = logging.getLogger(__name__)


class Prewarmer:
    """Has a stager make memory for the first save, by the states of the steps before.

    It looks at the states of steps 1, 2, 4, 8 and so on, because a state may grow: an optimizer makes its moments at
    its first step, which may come late where gradients are accumulated. All ranks look at the same steps.

    Args:
        stager: makes the memory
    """

    def __init__(self, stager: Stager) -> None:
        self._stager = stager
        self._steps = 0
        self._is_over = False

    def look(self, state_dict: Mapping[Any, Any]) -> None:
        """Called with the state after a step that is not saved. Errors are warnings: the save itself raises them."""
        self._steps += 1
        if self._is_over or self._steps & (self._steps - 1):
            return
        try:
            self._stager.reserve(state_dict)
        except Exception as error:  # also what a `state_dict()` of the state raises
            self._is_over = True
            logger.warning("the first save will fail, unless the state changes: %s: %s", type(error).__name__, error)
