"""Return freed memory to the system."""

from __future__ import annotations

from . import libc


def give_back_freed() -> None:
    """Return freed memory to the system: planning frees much, which the C library would keep."""
    if libc.malloc_trim is not None:
        libc.malloc_trim(0)
