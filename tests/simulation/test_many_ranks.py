"""Thousands of ranks commit together, and the cost for each hardly grows; what may happen to them is in tests/world."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from simulation.ranks import LIMIT, Job, files_of, unsafe

from ckpt_component.testing.simulation import Simulation


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [200, pytest.param(10_000, marks=pytest.mark.soak)])
def test_many_ranks_commit_and_the_cost_per_rank_hardly_grows(
    world_size: int, record_property: Callable[[str, object], None]
) -> None:
    began = time.process_time()
    job = Job(Simulation(1, quickest=5e-5, slowest=5e-4), files_of("rename"), world_size, steps=(1,))
    job.start()
    assert job.simulation.run(LIMIT)
    assert [each.error for each in job.outcomes] == [None] * world_size
    assert not unsafe(job.files, job)
    requests = job.store.requests / world_size
    seconds = max(each.ended - each.began for each in job.outcomes)
    used = time.process_time() - began
    text = f"{world_size} ranks: {requests:.0f} requests per rank, {seconds:.1f} simulated s, {used:.1f} s of CPU"
    record_property("cost", text)
    print(text)
    assert requests < 60  # each polls more often the longer the others take
    assert seconds < 10
