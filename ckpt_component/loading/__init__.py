"""From a checkpoint to the tensors and objects of a state: matched, read, verified, on all ranks or on none."""

from .reader import Reader

__all__ = ["Reader"]
