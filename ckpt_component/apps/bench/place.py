"""A folder on the target, for as long as something is measured there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...config.errors import HydraConfigError


@contextmanager
def place(parent: Path, key: str) -> Iterator[str]:
    """A folder that is made for the run and removed after it.

    Args:
        parent: where it is made.
        key: what the user typed the parent for, such as `dir=`.

    Raises:
        CheckpointConfigError: none can be made there.
    """
    try:
        base = tempfile.mkdtemp(prefix="ckpt-bench-", dir=parent)
    except OSError as error:
        raise HydraConfigError(f"{key}{parent}: no folder can be made there ({error.strerror}).") from error
    try:
        yield base
    finally:
        shutil.rmtree(base)
