"""Names that users type: what was probably meant by an unknown one, and what to type instead of an old one."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TypeVar

from ..errors import CheckpointConfigError

E = TypeVar("E", bound=Enum)


def closest(word: str, words: Iterable[str], cutoff: float = 0.7) -> str | None:
    """Return the entry of `words` of which `word` is most likely a misspelling or an abbreviation, or None."""
    names = list(words)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    longer = [name for name in names if len(word) > 3 and name.startswith(word)]
    if longer and not any(name.startswith(word) for name in matches):
        return longer[0]
    matches = matches or [name for name in names if sorted(name) == sorted(word)]  # `dpc`: too short for a ratio
    if matches or len(word) < 3:
        return next(iter(matches), None)
    # Abbreviations such as `ckpt` and `async`: the first letter, then the others in this order.
    pattern = re.compile(".*".join(map(re.escape, word)))
    expansions = [name for name in names if len(name) <= 3 * len(word) and pattern.match(name)]
    completions = [name for name in expansions if name.startswith(word)]
    return completions[0] if completions else expansions[0] if len(expansions) == 1 else None


def typed(key: str, value: str) -> str:
    """Format `key=value` for Hydra in a shell; a value with special characters is quoted for both."""
    if re.fullmatch(r"[\w/.+@%:-]+", value):
        return f"{key}={value}"
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    return f"'{key}=\"{quoted}\"'"


#: Words that other programs have for ours.
_OTHER_WORDS = {
    "continue": "warn",
    "huggingface": "hf",
    "ignore": "warn",
    "last": "auto",
    "latest": "auto",
    "newest": "auto",
}


def invalid_choice(
    key: str, value: object, words: Sequence[str], descriptions: Sequence[str] = (), *, form: str = "{}={}"
) -> str:
    """The message for an invalid value of a key.

    Args:
        key: its name
        value: what it was given
        words: valid values
        descriptions: other valid values, in words
        form: what is typed to give `key` one of `words`
    """
    others = {word: ours for word, ours in _OTHER_WORDS.items() if ours in words}
    near = str(value) if value in others else closest(str(value), [*words, *others])
    suggestion = others.get(near or "", near)
    *choices, last = [*words, *descriptions]
    choice = f"{', '.join(choices)} or {last}" if choices else last
    return f"{key} must be {choice}, got {value}." + (
        f" Did you mean {form.format(key, suggestion)}?" if suggestion else ""
    )


def member(key: str, value: E | str, words: type[E]) -> E:
    """The member of an enum, also by its name, as composed configs have it.

    Raises:
        CheckpointConfigError: there is no such member
    """
    if isinstance(value, words):
        return value
    if value not in words.__members__:
        raise CheckpointConfigError(invalid_choice(key, value, list(words.__members__)))
    return words[str(value)]


def warn_deprecated(old: str, new: str, *, removed_in: str) -> None:
    """Warn that a module, a name or a config key has another name now.

    Call it where the old name is used: at the top of a module that has moved, or where a key is read.

    Args:
        old: as users type it
        new: what to type instead
        removed_in: the release without the old name, such as `0.4`
    """
    # A module is imported through several frames of importlib, which are not shown; the import is named by `old`.
    text = f"{old} is deprecated, and {removed_in} will not have it: use {new}."
    warnings.warn(text, DeprecationWarning, stacklevel=3)
