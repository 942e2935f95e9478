"""Look for a violation in one workload: every fault at every operation, until one is found."""

from __future__ import annotations

from simulation.workloads import WORKLOADS
from simulation.world import World, configs_are_kept

from ckpt_component.testing import Fault


def find(name: str, protocol: str) -> int:
    """Print the first violation. Returns 1; 0 if there is none."""
    workload = next(workload for workload in WORKLOADS if workload.name == name)
    with configs_are_kept():
        try:
            world = World(workload, protocol)
        except AssertionError as error:
            print("violation without a fault:", error)
            return 1
        for number, operation in reversed([*enumerate(world.operations, 1)]):
            found = world.cut_at(number, range(8)) or world.fail_at(number, Fault("lost"))
            if found:
                print(f"violation at {number} {operation}: {found[0]}")
                return 1
    return 0
