"""Configs: schema, composition, checks, and building of parts. Imports no torch.

The dataclasses of the schema are for structured configs: `Checkpoint` is the config below `checkpoint`,
`Save`, `Keep`, `Best`, `Retry` and `Timeouts` are nodes of it, and the others are the configs of parts, which have the
names of their classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core._lazy import lazy

if TYPE_CHECKING:
    from .config_files import config_dir, recipe_dir
    from .hydra.compose import compose_checkpoint
    from .hydra.hints import override_hints
    from .hydra.hydra_errors import CheckpointConfigError
    from .hydra.parts import build_part, part_class
    from .hydra.resolve import resolve_config
    from .schema import (
        Best,
        Checkpoint,
        DcpWriter,
        InlineCaller,
        Keep,
        LiveStager,
        PersistentCaller,
        PinnedStager,
        Retry,
        SafetensorsWriter,
        Save,
        SharedMemoryStager,
        TemporalCaller,
        Timeouts,
        TorchSaveWriter,
        ZeroOverheadStager,
    )

__all__, __getattr__, __dir__ = lazy(
    __name__,
    {
        ".hydra.compose": "compose_checkpoint",
        ".hydra.hydra_errors": "CheckpointConfigError",
        ".config_files": "config_dir recipe_dir",
        ".hydra.hints": "override_hints",
        ".hydra.parts": "build_part part_class",
        ".hydra.resolve": "resolve_config",
        ".schema": (
            "Checkpoint Save Keep Best Retry Timeouts LiveStager PinnedStager SharedMemoryStager ZeroOverheadStager "
            "InlineCaller TemporalCaller PersistentCaller DcpWriter TorchSaveWriter SafetensorsWriter"
        ),
    },
)
