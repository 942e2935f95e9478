"""Functions of ranks for test_recording.py."""

from __future__ import annotations

from pathlib import Path

import torch

from ckpt_component import CheckpointListener, SaveReport, build_manager


class OfLeader(CheckpointListener):
    """Is told on rank 0 alone."""

    every_rank = False
    calls = 0

    def on_committed(self, report: SaveReport) -> None:
        self.calls += 1


def saves(rank: int, world_size: int, folder: Path) -> None:
    """Two saves, each with another part of the state on each rank."""
    listener = OfLeader()
    with build_manager("async_persistent", ["checkpoint.save.every_steps=2"], dir=folder / "run") as manager:
        manager.add_listener(listener)
        for step in range(1, 5):
            manager.maybe_save(step, {f"of_{rank}": torch.full((100 * (rank + 1),), float(step))})
    assert listener.calls == (2 if rank == 0 else 0)
