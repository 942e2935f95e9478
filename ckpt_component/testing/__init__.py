"""A disk and a bucket that are simulated, and fail where a test says: for tests of training code and of your own parts.

Beside the names below, these modules are imported by themselves:

- `faults`: a save fails, hangs or loses its writer process at a phase of your choice
- `conformance`: what a stager, a caller, a writer and a storage must do, as classes of tests; needs pytest
- `simulation`: processes on simulated time, with the store of `simulated_store`; needs greenlet
"""

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
