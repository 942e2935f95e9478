"""The one way in which a name that users import or type is retired: it works for two minor releases, with a warning."""

from __future__ import annotations

import warnings


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
