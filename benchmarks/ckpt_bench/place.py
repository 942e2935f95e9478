"""A temporary folder on the target of a measurement."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_component.config.hydra.hydra_errors import HydraConfigError


@contextmanager
def place(parent: Path, key: str) -> Iterator[str]:
    """Create a folder for the run, and remove it afterwards.

    Args:
        parent: the folder to create it in
        key: the key or option that sets the parent, such as `dir=`, for the error text

    Raises:
        CheckpointConfigError: no folder can be created there
    """
    try:
        base = tempfile.mkdtemp(prefix="ckpt-bench-", dir=parent)
    except OSError as error:
        raise HydraConfigError(f"{key}{parent}: no folder can be made there ({error.strerror}).") from error
    try:
        yield base
    finally:
        shutil.rmtree(base)
