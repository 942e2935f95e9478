"""Load checkpoints: our own, verified and in parallel, and those of stock torch and safetensors."""

from .reader import Reader

__all__ = ["Reader"]
