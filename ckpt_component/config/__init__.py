"""Configs: schema, composing for scripts, checking, and building parts. Imports no torch.

Names are imported when they are first used, because all rooms import `config.errors` and few need the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compose import compose_checkpoint
    from .errors import CheckpointConfigError
    from .hints import override_hints
    from .parts import build_part, part_class
    from .resolve import resolve_config
    from .schema import Checkpoint
    from .store import config_dir, recipe_dir

__all__ = [
    "Checkpoint",
    "CheckpointConfigError",
    "build_part",
    "compose_checkpoint",
    "config_dir",
    "override_hints",
    "part_class",
    "recipe_dir",
    "resolve_config",
]

_HOMES = {
    "Checkpoint": "schema",
    "CheckpointConfigError": "errors",
    "build_part": "parts",
    "compose_checkpoint": "compose",
    "config_dir": "store",
    "override_hints": "hints",
    "part_class": "parts",
    "recipe_dir": "store",
    "resolve_config": "resolve",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
