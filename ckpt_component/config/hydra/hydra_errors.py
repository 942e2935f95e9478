"""`CheckpointConfigError` as Hydra prints it: plain text without a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from hydra.errors import CompactHydraException

from ...errors import CheckpointConfigError

__all__ = ["CheckpointConfigError", "HydraConfigError", "brief_refusals", "built_text", "for_hydra"]

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


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


def brief_refusals(build: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Have the traceback of a config that is refused end with the call of `build`.

    What is to be typed instead is in the last line, and how Hydra and OmegaConf came to it is of no use. An error of a
    user's class stays the cause, with its traceback.
    """

    @wraps(build)
    def refusing(*args: _Given.args, **options: _Given.kwargs) -> _Made:
        try:
            with for_hydra():
                return build(*args, **options)
        except HydraConfigError as error:
            refusal = error
        raise refusal.with_traceback(None) from refusal.__cause__

    return refusing
