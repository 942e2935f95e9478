"""The storages of a world, as its processes see them: each use is an operation, before which a trouble may come."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from simulated.storages import ProcessFiles

from ckpt_component.testing import Disk, Fault, SimulatedBucket, SimulatedFiles, SimulatedObjects
from ckpt_component.testing.simulated_bucket import BucketRequests
from ckpt_component.testing.simulation import SimulatedProcess

if TYPE_CHECKING:
    from world.world import World

T = TypeVar("T")

#: What may stand behind the folder of a run: a disk with renames and locks, one without, a bucket; and a disk where
#: nothing is synced, as with `durability=process_crash`.
KINDS = ("disk", "mounted", "bucket", "unsynced")


def new_storage(kind: str) -> SimulatedFiles | SimulatedBucket:
    """An empty storage, as no process sees it."""
    if kind == "bucket":
        return SimulatedBucket(SimulatedObjects())
    has_renames = kind != "mounted"
    return SimulatedFiles(Disk(), atomic_rename=has_renames, locks=has_renames, durable=kind != "unsynced")


def seen_by(
    process: SimulatedProcess, world: World, storage: SimulatedFiles | SimulatedBucket
) -> WorldFiles | WorldBucket:
    """A storage, as a process sees it."""
    if isinstance(storage, SimulatedBucket):
        return WorldBucket(process, world, storage)
    return WorldFiles(process, world, storage)


class WorldFiles(ProcessFiles):
    """Files on a disk that processes of several ranks may share."""

    def __init__(self, process: SimulatedProcess, world: World, files: SimulatedFiles) -> None:
        super().__init__(process, files)
        self._world = world

    def at_disk(self) -> AbstractContextManager[Disk]:
        """The disk, for a look."""
        self._world.operation(self.process, "look")
        return super().at_disk()

    def open_folder(self, path: str) -> int:
        """Open a folder; what a process has open is closed when it ends."""
        fd = super().open_folder(path)
        self._world.folders[self.disk][fd] = self.process
        return fd

    def flock(self, fd: int, how: int) -> None:
        """Lock a folder, unless one has it that lives."""
        opened = self._world.folders[self.disk]
        for other, process in [*opened.items()]:
            if process.is_dead:
                del opened[other]
                self.close_folder(other)
        super().flock(fd, how)

    def change(self, operation: str, path: str, effect: Callable[[], T]) -> T:
        fault = self._world.operation(self.process, "change", operation, path)
        with super().at_disk():
            result = done(fault, path, effect)
        self._world.changed(self.process, operation, path)
        return result


class WorldBucket(SimulatedBucket):
    """A client of a bucket."""

    def __init__(self, process: SimulatedProcess, world: World, bucket: SimulatedBucket) -> None:
        super().__init__(bucket.disk, requests=WorldRequests(process, world, bucket.disk))
        self.outside = process.outside

    @property
    def home(self) -> str:
        """No other process needs to find a client."""
        return ""


class WorldRequests(BucketRequests):
    """The requests of a client of a bucket."""

    def __init__(self, process: SimulatedProcess, world: World, bucket: SimulatedObjects) -> None:
        super().__init__(bucket, {}, lambda path: True)
        self._process, self._world = process, world

    def request(self, name: str, path: str, effect: Callable[[], T]) -> T:
        """Make a request, or what its fault says."""
        kind = "look" if name in ("get", "head", "list") else "change"
        fault = self._world.operation(self._process, kind, name, path)
        self._process.turn()
        self.bucket.now = max(self.bucket.now, 1.8e9 + self._process.simulation.now)
        result = done(fault, path, effect)
        if kind == "change":
            self._world.changed(self._process, name, path)
        return result


def done(fault: Fault | None, path: str, effect: Callable[[], T]) -> T:
    """The result of an operation, or the error that its fault says."""
    if fault is not None and fault.kind == "fail":
        raise OSError(fault.code, os.strerror(fault.code), path)
    result = effect()
    if fault is not None and fault.kind == "lost":
        code = errno.ECONNRESET if fault.code == errno.EIO else fault.code
        raise OSError(code, os.strerror(code), path)
    return effect() if fault is not None and fault.kind == "twice" else result
