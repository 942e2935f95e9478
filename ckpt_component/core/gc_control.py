"""Pause garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection, where much is made that stays.

    A walk over thousands of tensors would trigger full collections, and so would the modules of a package: torch leaves
    so many objects that a collection among them takes 0.1 s and frees nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
