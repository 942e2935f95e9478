"""Two ranks save to the bucket `BUCKET` and find what they saved."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ckpt_component import build_checkpointer, build_manager


def save_and_restore(rank: int, world_size: int, folder: Path) -> None:
    """Save two steps, keep the last, and restore it in a second run."""
    url = [f"checkpoint.dir={os.environ['BUCKET']}/run", "checkpoint.save.every_steps=1", "checkpoint.keep.last=1"]
    with build_manager("async_persistent", url) as manager:
        for step in (1, 2):
            manager.maybe_save(
                step, {"all": torch.full((9,), float(step)), f"of_{rank}": torch.full((9,), rank + step)}
            )
    state = {"all": torch.zeros(9), f"of_{rank}": torch.zeros(9, dtype=torch.int64)}
    with build_manager("async_persistent", url) as manager:
        restored = manager.restore(state)
    print(restored, state["all"][0].item(), state[f"of_{rank}"][0].item())


def load_on_two_hosts(rank: int, world_size: int, folder: Path) -> None:
    """Load what is whole on one rank, each rank on a host of its own."""
    os.environ["CKPT_HOST"] = f"host{rank}"
    state = {f"layer.{number}": torch.zeros(250_000) for number in range(20)}
    with build_checkpointer("sync") as checkpointer:
        checkpointer.load(f"{os.environ['BUCKET']}/one", state)
    print(sum(value[0].item() for value in state.values()))
