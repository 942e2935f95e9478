"""Ranks that ask each other on simulated time, over a simulated store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckpt_component import CheckpointError
from ckpt_component.core.coordination import RankStore, StoreCoordinator
from ckpt_component.core.coordination.connection import StoreConnection
from ckpt_component.testing.simulated_store import MessageFault, SimulatedStore
from ckpt_component.testing.simulation import SimulatedProcess, Simulation

Ask = Callable[[StoreCoordinator], Any]


def outcomes(
    seed: int,
    world_size: int,
    ask: Ask,
    deaths: Mapping[int, float] | None = None,
    faults: Mapping[int, MessageFault] | None = None,
    left: dict[str, bytes] | None = None,
) -> dict[int, Any]:
    """What `ask` returns or raises on each rank that lives; the torchrun agent holds the store.

    Args:
        seed: of the schedule
        world_size: number of ranks
        ask: called on each rank
        deaths: when a rank is killed
        faults: what happens to requests to the store, by their number
        left: gets what the store holds at the end
    """
    simulation, found = Simulation(seed), dict[int, Any]()
    store = SimulatedStore(simulation.process("agent"), faults)

    def run(rank: int, process: SimulatedProcess) -> None:
        connection = StoreConnection(store.connect(process), 60.0, opens=False, outside=process.outside)
        ranks = StoreCoordinator(RankStore(connection, rank, world_size, "run/"), 10.0, 30.0)
        try:
            found[rank] = ask(ranks)
        except CheckpointError as error:
            found[rank] = error
        process.outside.sleep(60.0)
        ranks.close()

    for rank in range(world_size):
        process = simulation.process(f"rank {rank}")
        process.start(run, rank, process)
        if deaths and rank in deaths:
            simulation.at(deaths[rank], process.kill)
    assert simulation.run(600.0)
    if left is not None:
        left.update(store.values)
    return found


def after(ranks: StoreCoordinator, seconds: float) -> float:
    return ranks.outside.now() + seconds
