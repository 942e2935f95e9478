"""Another run, which keeps a snapshot on the same hosts: its folder is another one, or was at the same path before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from world.states import part_of, state_of
from world.storages import new_storage, seen_by

from ckpt_component.core.coordination import RankStore, StoreCoordinator
from ckpt_component.core.coordination.connection import StoreConnection
from ckpt_component.factory.graph import manager_of
from ckpt_component.factory.launch import Launch
from ckpt_component.testing.simulated_store import SimulatedStore
from ckpt_component.testing.simulation import SimulatedProcess

if TYPE_CHECKING:
    from world.world import World

    from ckpt_component.core.storage.storage import Storage

#: The step that it has.
STEP = 91


class Strangers:
    """See the top of this file. Its processes begin now, and end when their snapshot is kept; the servers live on.

    Args:
        world: where
        root: the path of its folder
        hosts: of its ranks

    Attributes:
        processes: its ranks
    """

    def __init__(self, world: World, root: str, hosts: tuple[str, ...]) -> None:
        self._world, self._root = world, root
        self._files = new_storage("disk")
        self._files.make_folders(root)
        simulation = world.simulation
        self._agent = simulation.process("agent of another run", hosts[0])
        self._store = SimulatedStore(self._agent)
        self.processes = [simulation.process(f"rank {rank} of another run", host) for rank, host in enumerate(hosts)]
        for rank, process in enumerate(self.processes):
            process.start(self._live, rank, process)

    def storage(self, process: SimulatedProcess) -> Storage:
        """Its storage, as one of its processes sees it."""
        return seen_by(process, self._world, self._files)

    def _live(self, rank: int, process: SimulatedProcess) -> None:
        with self._ended(process):
            outside, ranks = process.outside, len(self.processes)
            store = StoreConnection(self._store.connect(process), 10.0, opens=False, outside=outside)
            manager = manager_of(
                self._world.settings(self._root),
                Launch(),
                storage_of=lambda path: self.storage(process),
                outside=outside,
                ranks=StoreCoordinator(RankStore(store, rank, ranks, "ckpt/"), 10.0, 30.0),
            )
            manager.maybe_save(STEP, part_of(rank, state_of(99, STEP, ranks)))
            manager.wait()
            outside.sleep(2.0)  # for the copies at peers

    @contextmanager
    def _ended(self, process: SimulatedProcess) -> Iterator[None]:
        try:
            yield
        finally:
            process.kill()
