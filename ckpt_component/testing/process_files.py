"""`ProcessFiles`: the files of a simulated disk, as a simulated process sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .disk import Disk
from .simulated_files import SimulatedFiles
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
