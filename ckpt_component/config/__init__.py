"""Configs: schema, composition, checks, and building of parts. Imports no torch.

The dataclasses of the schema are for structured configs: `Checkpoint` is the config below `checkpoint`,
`Save`, `Keep`, `Best`, `Retry` and `Timeouts` are nodes of it, and the others are the configs of parts, which have the
names of their classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core._lazy import lazy

if TYPE_CHECKING:
    from .config_files import config_dir as config_dir, recipe_dir as recipe_dir
    from .hydra.compose import compose_checkpoint as compose_checkpoint
    from .hydra.hints import override_hints as override_hints
    from .hydra.hydra_errors import CheckpointConfigError as CheckpointConfigError
    from .hydra.parts import build_part as build_part, part_class as part_class
    from .hydra.resolve import resolve_config as resolve_config
    from .schema import (
        Best as Best,
        Checkpoint as Checkpoint,
        DcpWriter as DcpWriter,
        InlineCaller as InlineCaller,
        Keep as Keep,
        LiveStager as LiveStager,
        PersistentCaller as PersistentCaller,
        PinnedStager as PinnedStager,
        Retry as Retry,
        SafetensorsWriter as SafetensorsWriter,
        Save as Save,
        SharedMemoryStager as SharedMemoryStager,
        TemporalCaller as TemporalCaller,
        Timeouts as Timeouts,
        TorchSaveWriter as TorchSaveWriter,
        ZeroOverheadStager as ZeroOverheadStager,
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
