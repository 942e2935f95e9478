"""Configs: schema, composition, checks, and building of parts. Imports no torch.

The dataclasses of the schema are for structured configs: `Checkpoint` is the config below `checkpoint`,
`Save`, `Keep`, `Best`, `Retry` and `Timeouts` are nodes of it, and the others are the configs of parts, which have the
names of their classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .compose import compose_checkpoint
    from .errors import CheckpointConfigError
    from .files import config_dir, recipe_dir
    from .hints import override_hints
    from .parts import build_part, part_class
    from .resolve import resolve_config
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
        ".compose": "compose_checkpoint",
        ".errors": "CheckpointConfigError",
        ".files": "config_dir recipe_dir",
        ".hints": "override_hints",
        ".parts": "build_part part_class",
        ".resolve": "resolve_config",
        ".schema": (
            "Checkpoint Save Keep Best Retry Timeouts LiveStager PinnedStager SharedMemoryStager ZeroOverheadStager "
            "InlineCaller TemporalCaller PersistentCaller DcpWriter TorchSaveWriter SafetensorsWriter"
        ),
    },
)
