"""Storages of simulated processes: each use of one is a turn of the process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from ckpt_component.testing import Disk, SimulatedBucket, SimulatedFiles
from ckpt_component.testing.simulated_bucket import BucketRequests
from ckpt_component.testing.simulation import SimulatedProcess

T = TypeVar("T")


class ProcessFiles(SimulatedFiles):
    """Each operation is a turn of the process. All processes share the disk, its faults, and its locks.

    Args:
        process: the process
        files: the files; used by objects of this class alone
    """

    def __init__(self, process: SimulatedProcess, files: SimulatedFiles) -> None:
        vars(self).update(vars(files))
        self.outside = process.outside
        self.process = process

    def at_disk(self) -> AbstractContextManager[Disk]:
        """A turn, then the disk."""
        self.process.turn()
        self.disk.now = max(self.disk.now, 1e9 + self.process.simulation.now)
        return super().at_disk()


class ProcessBucket(SimulatedBucket):
    """The bucket as a simulated process sees it: each request is a turn of the process, by whose clock pauses go.

    Args:
        process: the process
        bucket: the bucket, whose objects and faults all processes share; used by objects of this class alone
    """

    def __init__(self, process: SimulatedProcess, bucket: SimulatedBucket) -> None:
        super().__init__(bucket.disk, requests=_ProcessRequests(process, bucket.requests))
        self.outside = process.outside


class _ProcessRequests(BucketRequests):
    """The requests of one process; their numbers are those of all."""

    def __init__(self, process: SimulatedProcess, shared: BucketRequests) -> None:
        vars(self).update(vars(shared))
        self._process = process

    def request(self, name: str, path: str, effect: Callable[[], T]) -> T:
        self._process.turn()
        self.bucket.now = max(self.bucket.now, 1.8e9 + self._process.simulation.now)
        return super().request(name, path, effect)
