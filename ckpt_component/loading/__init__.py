"""From a checkpoint to memory, verified and in parallel; `foreign` reads what other programs wrote, safely."""

from .reader import Reader

__all__ = ["Reader"]
