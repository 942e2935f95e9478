"""One to four ranks commit together, under hundreds of schedules: what must never be is not, and all calls return."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator

import pytest
from evidence import Record
from simulation.ranks import LIMIT, Job, Schedule, each_request, files_of, unsafe
from strides import in_turn

from ckpt_component.testing.simulation import Simulation

#: Schedules that one test tries, how many tests there are of each kind, and every how many of them have their turn.
EACH, PARTS, STRIDE = 30, 60, 60


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # thousands of failures are reported
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["rename", "manifest", "bucket"])
@pytest.mark.parametrize("part", in_turn(range(PARTS), STRIDE))
def test_ranks_commit_together_or_not_at_all(part: int, protocol: str, record_property: Record) -> None:
    wrong = []
    for seed in range(part * EACH, (part + 1) * EACH):
        schedule = Schedule(seed, protocol)
        wrong += [f"seed {seed}: {', '.join(schedule.what)}: {text}" for text in schedule.wrong]
    record_property("schedules", EACH)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world_size"),
    in_turn(itertools.product(["lost", "unanswered", "late", "stopped", "killed"], [1, 2, 3, 4]), 9),
)
@pytest.mark.parametrize("protocol", ["rename", pytest.param("bucket", marks=pytest.mark.slow)])
def test_each_request_of_a_save_meets_a_fault_once(protocol: str, kind: str, world_size: int) -> None:
    wrong = each_request(kind, protocol, world_size, stride=max(1, world_size - 1))
    assert not wrong, "\n".join(wrong)


def test_a_seed_is_a_schedule() -> None:
    def run(seed: int) -> tuple[int, int, list[float]]:
        simulation = Simulation(seed)
        job = Job(simulation, files_of("rename"), 3)
        job.start()
        assert simulation.run(1000.0)
        return simulation.turns, job.store.requests, [each.ended for each in job.outcomes]

    assert run(1) == run(1)
    assert run(1) != run(2)


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
