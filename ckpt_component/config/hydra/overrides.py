"""Parse one override, `key=value`, and suggest a correction if that fails."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from ...core.spelling import typed
from .hydra_errors import HydraConfigError

_NAME = re.compile(r"[\w./@]+")


def parse_override(text: str, several: bool = True) -> Override:
    """Parse one `key=value`.

    Args:
        text: the override as typed
        several: allow several values, as in a sweep

    Raises:
        CheckpointConfigError: it cannot be parsed (the text shows how to quote it), or has several values
    """
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        key, equals, value = text.partition("=")
        plain = _misspelt(text, key, value) if _NAME.fullmatch(key.lstrip("+~")) or not equals else None
        if plain:
            raise HydraConfigError(f"{text!r} is not of the form key=value. Did you mean {plain}?") from None
        if not equals:
            raise HydraConfigError(
                f"{text!r} is not of the form key=value, such as checkpoint=async_persistent."
            ) from None
        raise HydraConfigError(
            f"{text} cannot be read ({_first_line(error)}). A value with special characters needs quotes, in "
            f"the shell two pairs of them: {typed(key, value)}."
        ) from None
    if override.is_sweep_override() and not several:
        raise HydraConfigError(
            f"{text} has several values. Quote them if they are one string; to sweep, run a Hydra app with -m."
        )
    return override


def torn_apart(overrides: Sequence[str]) -> str | None:
    """The text for `checkpoint = sync`, which the shell splits into three words; None if nothing looks like it."""
    for number, text in enumerate(overrides):
        before = overrides[number - 1] if number else ""
        after = overrides[number + 1] if number + 1 < len(overrides) else ""
        if text.startswith("=") and _NAME.fullmatch(before):
            value = text[1:] or after
        elif text.endswith("=") and text.count("=") == 1 and after and "=" not in after:
            before, value = text[:-1], after
        else:
            continue
        return f"There must be no spaces around =. Did you mean {before}={value}?"
    return None


def _misspelt(text: str, key: str, value: str) -> str | None:
    """The correction of `checkpoint==sync`, `checkpoint/stager.arenas=2` or `checkpoint:sync`; None for all others."""
    colon = re.fullmatch(r"([\w./]+):\s*([^\s=]+)", text)
    if colon:
        return f"{colon[1]}={colon[2]}"
    if value.startswith("=") and value[1:]:
        return f"{key}={value[1:]}"
    if "/" in key and "." in key and "@" not in key and value:
        return f"{key.replace('/', '.')}={value}"
    return None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
