"""What a mistyped name may have meant, and what to type instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence


def closest(word: str, words: Iterable[str], cutoff: float = 0.7) -> str | None:
    """The one of `words` that `word` is most likely a slip of, or short for; or None."""
    names = list(words)
    near = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    near = near or [name for name in names if sorted(name) == sorted(word)]  # `dpc`: too short for a ratio
    if near or len(word) < 3:
        return next(iter(near), None)
    # `ckpt`, `async`: its letters in this order, from the first one on.
    pattern = re.compile(".*".join(map(re.escape, word)))
    longer = [name for name in names if len(name) <= 3 * len(word) and pattern.match(name)]
    begun = [name for name in longer if name.startswith(word)]
    return begun[0] if begun else longer[0] if len(longer) == 1 else None


def typed(key: str, value: str) -> str:
    """`key=value` as it is typed in a shell for Hydra; with special characters in two pairs of quotes."""
    if re.fullmatch(r"[\w/.+@%:-]+", value):
        return f"{key}={value}"
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    return f"'{key}=\"{quoted}\"'"


def other_word(key: str, value: object, words: Sequence[str], besides: Sequence[str] = ()) -> str:
    """The text for a value that is none of the words that `key` takes, nor anything that it takes besides."""
    near = closest(str(value), words)
    *choices, last = [*words, *besides]
    choice = f"{', '.join(choices)} or {last}" if choices else last
    return f"{key} must be {choice}, got {value}." + (f" Did you mean {key}={near}?" if near else "")
