"""Stagers take the snapshot: into which memory, and when training may continue."""

from .base import Snapshot, Stager, StatePlan
from .live import LiveStager
from .shared_memory import PinnedStager, SharedMemoryStager
from .zero_overhead import ZeroOverheadStager

__all__ = ["LiveStager", "PinnedStager", "SharedMemoryStager", "Snapshot", "Stager", "StatePlan", "ZeroOverheadStager"]
