"""The one error of configs.

It belongs to the family of `ckpt_component.errors` but lives here: it derives from a Hydra class, which makes
Hydra print it as plain text without a traceback, and importing Hydra takes longer than starting the writer
process.
"""

from __future__ import annotations

from hydra.errors import CompactHydraException

from ..errors import CheckpointError

__all__ = ["CheckpointConfigError"]


class CheckpointConfigError(CompactHydraException, CheckpointError, ValueError):
    """A config that cannot be built; the text has the key, its value, and what to type instead."""
