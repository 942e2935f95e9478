"""Look for a violation in one workload: every fault at every operation, until one is found."""

from __future__ import annotations

import itertools
import logging

import torch
from simulation.keepers import HostPatches
from simulation.rank_states import RankStagers
from simulation.ranks import Schedule, each_request
from simulation.recovery import Life, violations
from simulation.troubles import Trouble
from simulation.workloads import WORKLOADS
from simulation.world import World, one_thread

from ckpt_component.testing import Fault

#: How many schedules of several ranks are tried.
SCHEDULES = 150


def find(name: str, protocol: str) -> int:
    """Print the first violation. Returns 1; 0 if there is none."""
    if name == "ranks":
        return find_in_schedules(protocol)
    if name == "recovery":
        return find_in_lives()
    workload = next(workload for workload in WORKLOADS if workload.name == name)
    with one_thread():
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


def find_in_lives() -> int:
    """The same for a run of three ranks that keeps its snapshots in memory; a rank dies before its keeper has one."""
    logging.disable(logging.CRITICAL)
    with torch.no_grad(), HostPatches() as patches:
        stagers = RankStagers(3)
        try:
            for number, rank in itertools.product(range(1, 10), range(3)):
                life = Life(patches, stagers, [Trouble("kill_trainer", "give", number, rank)])
                if wrong := violations(life, ended=life.run()):
                    print(f"violation when {life.happened}: {wrong[0]}")
                    return 1
        finally:
            stagers.close()
    return 0


def find_in_schedules(protocol: str) -> int:
    """The same for several ranks."""
    logging.disable(logging.CRITICAL)
    for kind in ("lost", "unanswered", "late", "killed"):
        if wrong := each_request(kind, protocol):
            print(f"violation: {wrong[0]}")
            return 1
    for seed in range(SCHEDULES):
        schedule = Schedule(seed, protocol)
        if schedule.wrong:
            print(f"violation with seed {seed} ({', '.join(schedule.what)}): {schedule.wrong[0]}")
            return 1
    return 0
