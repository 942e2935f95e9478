"""The power goes off, or a call fails, at every operation of a workload, and the next life finds all in order."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from evidence import Record
from simulation.workloads import WORKLOADS
from simulation.world import Workload, World, one_thread
from strides import in_turn

from ckpt_component.testing import Fault

PROTOCOLS = ("rename", "manifest")
#: Of cuts and kills, and of faults: prime to the numbers of protocols and faults, so that each of these has a turn each time.
CUT_STRIDE, FAULT_STRIDE = 5, 11
FAULTS = {
    "fails": Fault("fail"),
    "fails_from_then_on": Fault("fail", lasts=True),
    "is_full": Fault("fail", errno.ENOSPC),
    "answer_lost": Fault("lost"),
}
#: Where a fault means something of its own.
ONLY_AT = {"is_full": ["write", "create", "make_folder", "append"]}


@pytest.fixture(autouse=True)
def one_thread_of_torch() -> Iterator[None]:
    with one_thread():
        yield


def cases(workloads: list[Workload], always: str) -> list[Any]:
    """Each workload on each protocol: one of them in every run, on one protocol; the others in turn."""
    quick = [workload for workload in workloads if workload.name == always]
    others = [workload for workload in workloads if workload.name != always]
    return [
        *in_turn(itertools.product(quick, PROTOCOLS), len(PROTOCOLS)),
        *in_turn(itertools.product(others, PROTOCOLS), CUT_STRIDE, marks=[pytest.mark.slow]),
    ]


def told(world: World, number: int, found: list[str]) -> list[str]:
    name, path = world.operations[number - 1]
    return [f"at operation {number} ({name} {path}): {text}" for text in found]


@pytest.mark.parametrize(("workload", "protocol"), cases(WORKLOADS, "retention"), ids=str)
def test_the_power_goes_off_at_every_operation(workload: Workload, protocol: str, record_property: Record) -> None:
    world, wrong = World(workload, protocol), []
    for number in range(1, len(world.operations) + 1):
        wrong += told(world, number, world.cut_at(number, [number]))
    record_property("simulated power cuts", len(world.operations))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("workload", "protocol"),
    cases([each for each in WORKLOADS if each.name != "collect"], "first_save"),  # collect cuts the power itself
    ids=str,
)
def test_a_kill_at_every_operation_without_any_sync(workload: Workload, protocol: str) -> None:
    """`durability=process_crash` promises this, and no more."""
    world, wrong = World(workload, protocol, durable=False), []
    for number in range(1, len(world.operations) + 1):
        wrong += told(world, number, world.kill_at(number))
    assert not wrong, "\n".join(wrong)
    assert not any("sync_folder" in name for name, _ in world.operations)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "protocol", "fault"), in_turn(itertools.product(WORKLOADS, PROTOCOLS, FAULTS), FAULT_STRIDE), ids=str
)
def test_every_operation(workload: Workload, protocol: str, fault: str, record_property: Record) -> None:
    world, wrong, faults = World(workload, protocol), [], 0
    for number, (name, _) in enumerate(world.operations, 1):
        if name in ONLY_AT.get(fault, [name]):
            faults += 1
            wrong += told(world, number, world.fail_at(number, FAULTS[fault]))
    record_property("simulated faults", faults)
    assert not wrong, "\n".join(wrong)
