"""Stagers: who takes the snapshot, into which memory, and when training may go on. One file a variant."""

from .base import Snapshot, Stager, StatePlan
from .live import LiveStager
from .pinned import PinnedStager
from .shared_memory import SharedMemoryStager
from .zero_overhead import ZeroOverheadStager

__all__ = ["LiveStager", "PinnedStager", "SharedMemoryStager", "Snapshot", "Stager", "StatePlan", "ZeroOverheadStager"]
