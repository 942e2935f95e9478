"""`Machine`: one process with several storages, whose operations are counted together and which end together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from ..core.outside import Outside, Pool, Thread
from .disk import Disk
from .simulated_bucket import BucketRequests, SimulatedBucket, SimulatedObjects
from .simulated_files import Fault, PowerCut, SimulatedFiles
from .simulated_pool import SimulatedPool
from .simulation import SimulatedProcess


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

    @contextmanager
    def at_disk(self) -> Iterator[Disk]:
        """A turn, then the disk."""
        self.process.turn()
        with super().at_disk() as disk:
            disk.now = max(disk.now, 1e9 + self.process.simulation.now)
            yield disk


T = TypeVar("T")


class Machine:
    """See the top of this file.

    Args:
        faults: what happens at the operations with these numbers, see `Fault`; the storages of one machine share them

    Attributes:
        operations: `(name, path)` of each operation, in their order
        is_off: whether the process has ended: it does nothing any more
        outside: on which pauses take no time; `slept` is called instead, and other processes may act there
        looked: called before each look at a storage of the machine: other processes may act there, too
        done: called after each operation
    """

    def __init__(self, faults: Mapping[int, Fault] | None = None) -> None:
        self.faults = {} if faults is None else faults
        self.operations: list[tuple[str, str]] = []
        self.is_off = False
        self.outside = PatientOutside()
        self.looked = self.done = _nothing

    def files(self, disk: Disk, *, atomic_rename: bool = True, durable: bool = True) -> MachineFiles:
        """Files on a disk; arguments as of `SimulatedFiles`."""
        return MachineFiles(self, disk, atomic_rename, durable)

    def bucket(self, objects: SimulatedObjects) -> SimulatedBucket:
        """A client of a bucket."""
        bucket = SimulatedBucket(objects, requests=_MachineRequests(self, objects))
        bucket.outside = self.outside
        return bucket


class _MachineRequests(BucketRequests):
    """The requests of a machine."""

    def __init__(self, machine: Machine, objects: SimulatedObjects) -> None:
        super().__init__(objects, machine.faults, lambda path: True)
        self.operations = machine.operations
        self._machine = machine

    def request(self, name: str, path: str, effect: Callable[[], T]) -> T:
        if self._machine.is_off:
            raise PowerCut
        self._machine.looked()
        try:
            return super().request(name, path, effect)
        except PowerCut:
            self._machine.is_off = True
            raise
        finally:
            self._machine.done()


class MachineFiles(SimulatedFiles):
    """Files of a machine; arguments as of `SimulatedFiles`."""

    def __init__(self, machine: Machine, disk: Disk, atomic_rename: bool = True, durable: bool = True) -> None:
        self._machine = machine
        super().__init__(disk, machine.faults, atomic_rename=atomic_rename, durable=durable)
        self.operations = machine.operations
        self.outside = machine.outside

    @property
    def is_off(self) -> bool:
        """Whether the machine has ended."""
        return self._machine.is_off

    @is_off.setter
    def is_off(self, off: bool) -> None:
        self._machine.is_off = self._machine.is_off or off

    @contextmanager
    def at_disk(self) -> Iterator[Disk]:
        """The disk, for one look or operation; other processes may act before it."""
        if not self.is_off:
            self._machine.looked()
        with super().at_disk() as disk:
            yield disk

    def _do(self, operation: str, path: str, effect: Callable[[], T]) -> T:
        try:
            return super()._do(operation, path, effect)
        finally:
            if not self.is_off:
                self._machine.done()


class PatientOutside(Outside):
    """A clock on which pauses take no time. Threads that touch marks of life do nothing, and pools do tasks in turn.

    Attributes:
        slept: called at each pause, with its seconds
    """

    def __init__(self) -> None:
        self.ahead = 0.0
        self.slept: Callable[[float], None] = lambda seconds: None
        self.now = lambda: 1e6 + self.ahead
        self.date = lambda: 1.8e9 + self.ahead
        self.sleep = self._sleep

    def _sleep(self, seconds: float) -> None:
        self.ahead += seconds
        self.slept(seconds)

    def start(self, name: str, function: Callable[..., None], *arguments: Any) -> Thread:
        """Start nothing: what threads of storages do, they do after seconds."""
        return _Ended()

    def pool(self, threads: int, name: str) -> Pool:
        """No threads: each task is done when it is submitted."""
        return SimulatedPool()


class _Ended:
    """In the place of a thread: it has ended."""

    def is_alive(self) -> bool:
        """It is not."""
        return False

    def join(self, timeout: float) -> None:
        """It has ended."""


def _nothing() -> None:
    """Nobody else acts."""
