"""Configs: schema, composition, checks, and building of parts. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .compose import compose_checkpoint
    from .errors import CheckpointConfigError
    from .hints import override_hints
    from .parts import build_part, part_class
    from .resolve import resolve_config
    from .schema import Checkpoint
    from .store import config_dir, recipe_dir

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        ".compose": "compose_checkpoint",
        ".errors": "CheckpointConfigError",
        ".hints": "override_hints",
        ".parts": "build_part part_class",
        ".resolve": "resolve_config",
        ".schema": "Checkpoint",
        ".store": "config_dir recipe_dir",
    },
)
