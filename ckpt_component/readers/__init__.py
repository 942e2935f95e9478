"""Checkpoints back into memory: ours verified and in parallel, and those of stock torch and safetensors."""

from .reader import Reader

__all__ = ["Reader"]
