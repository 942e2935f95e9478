"""What ranks know of a step, and what takes their snapshots of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from ckpt_component.core.outside import OUTSIDE
from ckpt_component.stagers.base import Snapshot
from ckpt_component.stagers.shared_memory import SharedMemoryStager
from ckpt_component.writers.dcp import DcpWriter

_WEIGHTS = 300


def state_of(job: int, step: int, ranks: int) -> dict[str, Any]:
    """What all ranks know of a step of a job; 0: the target of a restore."""
    generator = torch.Generator().manual_seed(1000 * job + step)
    return {
        f"rank{rank}": {"weight": torch.randn(_WEIGHTS, generator=generator), "step": [job, step, rank]}
        for rank in range(ranks)
    }


def blank(ranks: int) -> dict[str, Any]:
    return {f"rank{rank}": {"weight": torch.zeros(_WEIGHTS), "step": [0, 0, 0]} for rank in range(ranks)}


class RankStagers:
    """Takes the snapshots of the ranks; the plans stay for all lives."""

    def __init__(self, ranks: int) -> None:
        self.writer = DcpWriter(workers=1)
        self.ranks = ranks
        #: Descriptors of all memory that they have staged into.
        self.descriptors = set[int]()
        self._stagers = [SharedMemoryStager(arenas=16) for _ in range(ranks)]
        for rank, stager in enumerate(self._stagers):
            own = SimpleNamespace(rank=rank, world_size=ranks, outside=OUTSIDE)
            stager.connect(self.writer, ranks=cast(Any, own), shared=True, timeout=10.0)

    def take(self, rank: int, job: int, step: int) -> Snapshot:
        stager = self._stagers[rank]
        state = state_of(job, step, self.ranks)
        snapshot = stager.take(replace(stager.inspect({f"rank{rank}": state[f"rank{rank}"]}), wait_until=1e9))
        if snapshot.arena is not None:
            self.descriptors.add(snapshot.arena.shared_descriptor())
        return snapshot

    def close(self) -> None:
        for stager in self._stagers:
            stager.close()
