"""`ProcessFiles`: the files of a simulated disk, as a simulated process sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .disk import Disk
from .simulated_files import SimulatedFiles
from .simulation import SimulatedProcess


class ProcessFiles(SimulatedFiles):
    """Each operation is a turn of the process. All processes share the disk, its faults, and its locks.

    Args:
        process: the process
        files: the files; used by objects of this class alone
        before: called before each operation
    """

    def __init__(
        self, process: SimulatedProcess, files: SimulatedFiles, before: Callable[[], None] = lambda: None
    ) -> None:
        vars(self).update(vars(files))
        self.clock = process.clock
        self.process = process
        self._before = before

    @contextmanager
    def _look(self) -> Iterator[Disk]:
        self._before()
        self.process.turn()
        with super()._look() as disk:
            disk.now = max(disk.now, 1e9 + self.process.simulation.now)
            yield disk
