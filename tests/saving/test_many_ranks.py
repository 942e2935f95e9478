"""Thousands of ranks commit together, and the cost for each hardly grows. What may happen to them is in `tests/world`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from rank_writer import RankWriter, content, snapshot
from simulated.storages import ProcessFiles

from ckpt_component.core.commit.commit import new_attempt
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.manifest import data_folder
from ckpt_component.core.commit.names import MEGATRON, owned_token
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.coordination import RankStore, StoreCoordinator
from ckpt_component.core.coordination.connection import StoreConnection
from ckpt_component.core.options import ResolvedTimeouts
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.saving.attempts import SaveAttempts
from ckpt_component.saving.context import Admitted, NoRun, SaveContext, SaveRequest, Staged
from ckpt_component.testing import Disk, SimulatedFiles
from ckpt_component.testing.simulated_store import SimulatedStore
from ckpt_component.testing.simulation import SimulatedProcess, Simulation

ROOT = "/runs/one"
PATH = os.path.join(ROOT, MEGATRON.folder(1))
TIMEOUTS = ResolvedTimeouts(stage=20.0, write=60.0, heartbeat=10.0, stall=60.0, visible=20.0)


def save(rank: int, world_size: int, process: SimulatedProcess, store: SimulatedStore, disk: SimulatedFiles) -> float:
    """Save one step on a rank, without a manager; returns the simulated seconds that it took."""
    outside, files = process.outside, ProcessFiles(process, disk)
    connection = StoreConnection(store.connect(process), TIMEOUTS.heartbeat, opens=False, outside=outside)
    ranks = StoreCoordinator(RankStore(connection, rank, world_size, "run/"), TIMEOUTS.heartbeat, TIMEOUTS.stall)
    writer, run = cast(Any, RankWriter("run")), NoRun(lambda path: files)
    if rank == 0:
        run.ownership = FencingToken(files, ROOT)  # type: ignore[assignment]
    attempts = SaveAttempts(writer, writer, SaveContext(ranks, lambda path: files, TIMEOUTS, run))
    ranks.at_step(1)
    began = outside.now()

    def admit(proposals: list[Any]) -> list[str]:
        return [owned_token(new_token(outside)), run.ownership.token]

    token, owner = ranks.meet("save", PATH, admit, began + 60.0, PATH)
    attempt = new_attempt(files, PATH, token, owner)
    admitted = Admitted(SaveRequest(PATH, files, 1), cast(Any, None), 1, token, {})
    attempts.run(Staged(admitted, attempt, snapshot(), None, None, 0, 0.0), attempt, 1)
    seconds = outside.now() - began
    ranks.close()
    return seconds


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [200, pytest.param(10_000, marks=pytest.mark.soak)])
def test_many_ranks_commit_and_the_cost_per_rank_hardly_grows(
    world_size: int, record_property: Callable[[str, object], None]
) -> None:
    began, took = time.process_time(), list[float]()
    simulation, disk = Simulation(1, quickest=5e-5, slowest=5e-4), SimulatedFiles(Disk())
    disk.make_folders(ROOT)
    processes = [simulation.process(f"rank {rank}") for rank in range(world_size)]
    store = SimulatedStore(processes[0])
    for rank, process in enumerate(processes):
        process.start(lambda *its: took.append(save(*its)), rank, world_size, process, store, disk)
    assert simulation.run(600.0)
    (manifest,) = scan_steps(disk, ROOT, MEGATRON).manifests.values()
    data = data_folder(disk, PATH, manifest)
    for rank in range(world_size):
        assert disk.read(f"{data}/rank_{rank}", 1000) == content("run", 1, rank)
    requests, used = store.requests / world_size, time.process_time() - began
    text = f"{world_size} ranks: {requests:.0f} requests per rank, {max(took):.1f} simulated s, {used:.1f} s of CPU"
    record_property("cost", text)
    print(text)
    assert requests < 60  # each polls more often the longer the others take
    assert len(took) == world_size and max(took) < 10
