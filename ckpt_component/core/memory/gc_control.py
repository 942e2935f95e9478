"""Pause garbage collection, and return freed memory to the system."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from . import libc


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection: a walk over thousands of tensors would trigger full collections."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def give_back_freed() -> None:
    """Return freed memory to the system: planning frees much, which the C library would keep."""
    if libc.malloc_trim is not None:
        libc.malloc_trim(0)
