"""Look for a violation in lives of a run that keeps its snapshots in memory, until one is found."""

from __future__ import annotations

import itertools
import logging

import torch
from simulation.keepers import HostPatches
from simulation.rank_states import RankStagers
from simulation.recovery import Life, violations
from simulation.troubles import Trouble


def find() -> int:
    """Print the first violation where a rank of three dies before its keeper has the snapshot. Returns 1; 0: none."""
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
