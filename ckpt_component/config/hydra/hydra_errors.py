"""`CheckpointConfigError` as Hydra prints it: plain text without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import CompactHydraException

from ...errors import CheckpointConfigError

__all__ = ["CheckpointConfigError", "HydraConfigError", "built_text", "for_hydra"]


class HydraConfigError(CompactHydraException, CheckpointConfigError):
    """A config that cannot be built. Defined here because its Hydra base class is loaded by the config code only."""

    def __repr__(self) -> str:
        # `instantiate` puts the repr of an error into the text of its own.
        return f"CheckpointConfigError: {self}"


def built_text(place: str, cls: type) -> str:
    """The text for an object where a config belongs."""
    return (
        f"{place} is a {cls.__name__} that was built already, and the manager builds its parts itself; pass configs: "
        "instantiate(cfg.checkpoint) or build_manager(cfg.checkpoint), without instantiating anything below it before."
    )


@contextmanager
def for_hydra() -> Iterator[None]:
    """Raise a part's `CheckpointConfigError` as one that Hydra prints without a traceback."""
    try:
        yield
    except HydraConfigError:
        raise
    except CheckpointConfigError as error:
        raise HydraConfigError(str(error)) from error.__cause__
