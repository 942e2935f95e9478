"""Storage that is simulated, and fails where a test says: for tests of this package, of storages and of training."""

from __future__ import annotations

from .disk import Disk, DiskFile, DiskFolder
from .simulated_bucket import SimulatedBucket, SimulatedObjects
from .simulated_files import Fault, PowerCut, SimulatedFiles

__all__ = [
    "Disk",
    "DiskFile",
    "DiskFolder",
    "Fault",
    "PowerCut",
    "SimulatedBucket",
    "SimulatedFiles",
    "SimulatedObjects",
]
