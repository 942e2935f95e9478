"""From a checked config to the objects of a run: the only place that knows which parts fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core._lazy import lazy

if TYPE_CHECKING:
    from .graph import (
        build_checkpointer as build_checkpointer,
        build_manager as build_manager,
        instantiate_manager as instantiate_manager,
    )

__all__, __getattr__, __dir__ = lazy(__name__, {".graph": "build_checkpointer build_manager instantiate_manager"})
