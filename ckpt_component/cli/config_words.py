"""A config on the command line of `ckpt`: a preset and overrides; and quantities with units."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from ..config.quantities import quantity
from ..errors import CheckpointConfigError

#: The preset that is meant if none is named.
USUAL = "async_persistent"


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the option `--config`, whose words are `config` of what is parsed; empty without it."""
    more = "the config of the run: a preset and overrides, as for ckpt explain"
    parser.add_argument("--config", nargs="+", action="extend", default=[], metavar="PRESET|OVERRIDE", help=more)


def is_override(word: str) -> bool:
    """Whether a word sets a key or picks an option of a config."""
    return re.match(r"[+~]*(checkpoint|recipe)\b[^=]*=", word) is not None


def split_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """The preset and the overrides; `checkpoint=sync` is a preset too, as on the command line of an app.

    Raises:
        CheckpointConfigError: there are two presets
    """
    presets = [word for word in words if re.fullmatch(r"(\+?checkpoint=)?[^=~]+", word)]
    names = [word.rpartition("=")[2] for word in presets]
    if len(names) > 1:
        raise CheckpointConfigError(
            f"{' and '.join(names)} are two presets; give one, and overrides such as checkpoint/stager=pinned."
        )
    return (names or [USUAL])[0], [word for word in words if word not in presets]


def with_unit(text: str, unit: str, name: str, example: str) -> float:
    """A quantity above 0 that has a unit.

    Args:
        text: as it was typed
        unit: BYTES or SECONDS
        name: of the option
        example: a quantity, for errors

    Raises:
        CheckpointConfigError: it is not one; the text says what to type instead
    """
    if text.replace(".", "").isdigit():
        raise CheckpointConfigError(f"{name}={text} has no unit; type one, as in {name}={example}.")
    value = quantity(text, unit, name)
    refuse_below_zero(name, value)
    return value


def refuse_below_zero(name: str, value: float) -> None:
    """Refuse a value of an option that is not a finite one above 0."""
    if not 0 < value < float("inf"):
        raise CheckpointConfigError(f"{name}={value:g} must be above 0.")
