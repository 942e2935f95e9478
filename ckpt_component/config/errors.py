"""`CheckpointConfigError` as Hydra prints it: plain text without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import CompactHydraException

from ..errors import CheckpointConfigError

__all__ = ["CheckpointConfigError", "HydraConfigError", "for_hydra"]


class HydraConfigError(CompactHydraException, CheckpointConfigError):
    """A config that cannot be built. Defined here because its Hydra base class is loaded by the config code only."""


@contextmanager
def for_hydra() -> Iterator[None]:
    """Raise a part's `CheckpointConfigError` as one that Hydra prints without a traceback."""
    try:
        yield
    except HydraConfigError:
        raise
    except CheckpointConfigError as error:
        raise HydraConfigError(str(error)) from error.__cause__
