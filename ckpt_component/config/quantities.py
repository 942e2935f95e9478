"""Numbers of a config: the ranges of fields, and sizes and times as people write them: `8MB`, `2GiB`, `30m`, `1.5h`."""

from __future__ import annotations

import re
from dataclasses import field
from typing import TypeVar

from ..core.options import Range

T = TypeVar("T")

#: Units of a field's number, as its metadata.
BYTES, SECONDS = "bytes", "seconds"

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZES: dict[str, float] = {
    "": 1,
    "b": 1,
    **{f"{letter}{tail}": factor for letter, factor in _DECIMAL.items() for tail in ("", "b", "b/s")},
    **{f"{letter}i{tail}": factor for letter, factor in _BINARY.items() for tail in ("", "b", "b/s")},
}
_TIMES: dict[str, float] = {"": 1, "ms": 1e-3, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_UNITS = {BYTES: _SIZES, SECONDS: _TIMES}
_EXAMPLES = {
    BYTES: "a number of bytes, or one with a unit: 500MB (MB = 1e6), 8MiB (MiB = 2^20), 2GB",
    SECONDS: "a number of seconds, or one with a unit: 90s, 30m, 2h",
}
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z/]*)", re.IGNORECASE)


def within(limits: Range, default: T, unit: str | None = None) -> T:
    """A field for a number in a range, or None if its type allows it.

    Args:
        limits: the range
        default: the default value
        unit: BYTES or SECONDS, if the number may be written with a unit such as `8MB`
    """
    return field(default=default, metadata={"range": limits, "unit": unit})


def at_least(limit: float, default: T, unit: str | None = None) -> T:
    """As `within`, for a number of at least `limit`."""
    return within(Range(limit), default, unit)


def above(limit: float, default: T, unit: str | None = None) -> T:
    """As `within`, for a finite number above `limit`."""
    return within(Range.finite_above(limit), default, unit)


def quantity(text: str, unit: str, name: str) -> float:
    """Convert a string to a number, an int if it is whole.

    Args:
        text: a number, optionally with a unit
        unit: BYTES or SECONDS
        name: name of the key or option, for the error text

    Raises:
        CheckpointConfigError: it is not a quantity of this unit; the text says how to write one
    """
    match = _QUANTITY.fullmatch(text.strip())
    factor = _UNITS[unit].get(match[2].lower()) if match else None
    if match is None or factor is None:
        from .hydra.hydra_errors import (
            HydraConfigError,  # imports Hydra, which only a command that composes configs needs
        )

        raise HydraConfigError(f"{name} must be {allowed(unit)}; got {text}.")
    # Rounds 1.3GB, which floats may make fractional; 0.5 without a unit stays fractional and is refused later.
    number = float(match[1]) * factor
    if match[2] and unit == BYTES:
        number = round(number)
    return int(number) if number == int(number) else number


def allowed(unit: str) -> str:
    """A description of valid quantities."""
    return _EXAMPLES[unit]
