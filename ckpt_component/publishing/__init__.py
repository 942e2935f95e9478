"""Weights for inference: numbered versions, whole or as changes of the previous one, and their receiver."""

from __future__ import annotations

from .receiver import Weights as Weights, follow as follow

__all__ = ["Weights", "follow"]
