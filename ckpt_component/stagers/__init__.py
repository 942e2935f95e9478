"""Stagers, which take the snapshot: into which memory, and when training may continue."""

from .base import Snapshot, Stager, StatePlan
from .shared_memory import LiveStager, PinnedStager, SharedMemoryStager
from .zero_overhead import ZeroOverheadStager

__all__ = ["LiveStager", "PinnedStager", "SharedMemoryStager", "Snapshot", "Stager", "StatePlan", "ZeroOverheadStager"]
