"""Weights published to inference: numbered versions, whole or the changes of the one before, and who follows them."""

from __future__ import annotations

from .follow import follow as follow
from .weights_in_folder import Weights as Weights

__all__ = ["Weights", "follow"]
