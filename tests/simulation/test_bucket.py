"""Every request to a bucket meets every fault, and the next life finds all in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from evidence import Record
from simulation.test_every_operation import told
from simulation.workloads import WORKLOADS
from simulation.world import Workload, World, one_thread

from ckpt_component import build_manager
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.testing import Fault, SimulatedBucket, SimulatedObjects

FAULTS = {
    "fails": Fault("fail"),
    "fails_from_then_on": Fault("fail", lasts=True),
    "answer_lost": Fault("lost"),
    "is_done_twice": Fault("twice"),
}
#: In the quick tests and in CI; the soak has all.
QUICK, SLOW = ("by_path",), ("collect", "delete")


@pytest.fixture(autouse=True)
def one_thread_of_torch() -> Iterator[None]:
    with one_thread():
        yield


def marks_of(workload: Workload) -> list[pytest.MarkDecorator]:
    if workload.name in QUICK:
        return []
    return [pytest.mark.slow] if workload.name in SLOW else [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.mark.slow
@pytest.mark.parametrize("workload", [pytest.param(each, marks=marks_of(each)) for each in WORKLOADS], ids=str)
def test_every_request(workload: Workload, record_property: Record) -> None:
    world, wrong, faults = World(workload, "bucket"), list[str](), 0
    for number, (name, _) in enumerate(world.operations, 1):
        wrong += told(world, number, world.kill_at(number))
        faults += 1
        for kind, fault in FAULTS.items() if name != "end" else ():
            faults += 1
            wrong += [f"{kind} {text}" for text in told(world, number, world.fail_at(number, fault))]
    record_property("simulated requests", faults)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("lag", [1, 3, 10])
def test_a_listing_that_lags_loses_nothing(lag: int) -> None:
    """A run whose listings are some changes old keeps what it saved, and a later one finds it."""
    bucket = SimulatedObjects(lag=lag)
    settings = ["checkpoint.save.every_steps=null", "checkpoint.keep.last=2", "checkpoint.events=false"]
    with build_manager("sync", settings, dir="/runs/one", storage_of=lambda path: SimulatedBucket(bucket)) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"step": step})
            assert step in {
                *scan_steps(SimulatedBucket(SimulatedObjects(bucket.objects)), "/runs/one", MEGATRON).committed
            }
    bucket.lag = 0
    state = {"step": 0}
    with build_manager("sync", settings, dir="/runs/one", storage_of=lambda path: SimulatedBucket(bucket)) as manager:
        assert manager.restore(state) == 3 and state == {"step": 3}
