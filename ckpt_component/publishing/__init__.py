"""Weights published to inference: numbered versions, whole or the changes of the one before, and who follows them."""

from __future__ import annotations

from .receiver import Weights as Weights, follow as follow

__all__ = ["Weights", "follow"]
