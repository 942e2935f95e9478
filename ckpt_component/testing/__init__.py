"""Storage that is simulated, and fails where a test says: for tests of this package, of storages and of training."""

from __future__ import annotations

from .disk import Disk, DiskFile, DiskFolder
from .simulated_bucket import Bucket, SimulatedBucket
from .simulated_files import Fault, PowerCut, SimulatedFiles

__all__ = ["Bucket", "Disk", "DiskFile", "DiskFolder", "Fault", "PowerCut", "SimulatedBucket", "SimulatedFiles"]
