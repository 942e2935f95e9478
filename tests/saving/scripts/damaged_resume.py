"""What the ranks of test_resume_scan run: one rank alone finds damage, and all go on from the same older step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_component import build_manager

WHOLE = torch.arange(4000.0)


def state_of(step: int, world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    return {"weight": distribute_tensor(WHOLE * step, mesh, [Shard(0)]), "step": step}


def damaged_for_one(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1's part of step 3 is damaged: rank 0 loads its own part well, and falls back all the same."""
    overrides = ["checkpoint.save.every_steps=1", "checkpoint.save.at_end=false"]
    with build_manager("sync", overrides, dir=folder) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step, world_size))
    if rank == 1:
        path = folder / "iter_0000003" / "__1_0.distcp"
        whole = bytearray(path.read_bytes())
        whole[len(whole) // 2] ^= 1
        path.write_bytes(whole)
    torch.distributed.barrier()
    with build_manager("sync", overrides, dir=folder) as manager:
        state = state_of(0, world_size)
        assert manager.restore(state) == 2
        assert torch.equal(state["weight"].full_tensor(), WHOLE * 2) and state["step"] == 2
        assert not (folder / "iter_0000003").exists()
        # All ranks know that the step's name is free again.
        manager.save(3, state_of(3, world_size))
        manager.save(4, state_of(4, world_size))
    torch.distributed.barrier()  # rank 0 comes here once what keep.last has no room for is gone
    assert manager.steps() == [2, 3, 4], os.listdir(folder)
