"""Paths that a caller names: local, absolute, and not taken."""

from __future__ import annotations

import os

from ..errors import CheckpointConfigError
from ..storage.commit import refuse_existing
from .folders import expanded

PathLike = str | os.PathLike[str]


def new_path(path: PathLike) -> str:
    """The absolute form of a path to save to, which must be free.

    Raises:
        CheckpointExistsError: the path is taken.
        CheckpointConfigError: a URL.
    """
    target = absolute_path(path)
    refuse_existing(target)
    return target


def absolute_path(path: PathLike) -> str:
    """The absolute form of a local path. Raises CheckpointConfigError for a URL, and for a variable that is not set."""
    text = expanded(path, "path")
    if "://" in text:
        raise CheckpointConfigError(f"{text} is a URL, and checkpoints are saved to local or mounted folders only.")
    return os.path.abspath(text)
