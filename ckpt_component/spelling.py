"""What a mistyped name may have meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def closest(word: str, words: Iterable[str], cutoff: float = 0.7) -> str | None:
    """The one of `words` that `word` is most likely a slip of, or short for; or None."""
    known = list(words)
    near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    near = near or [name for name in known if sorted(name) == sorted(word)]  # `dpc`: too short for a ratio
    if near or len(word) < 3:
        return next(iter(near), None)
    # `ckpt`, `async`: its letters in this order, from the first one on.
    pattern = re.compile(".*".join(map(re.escape, word)))
    longer = [name for name in known if len(name) <= 3 * len(word) and pattern.match(name)]
    begun = [name for name in longer if name.startswith(word)]
    return begun[0] if begun else longer[0] if len(longer) == 1 else None
