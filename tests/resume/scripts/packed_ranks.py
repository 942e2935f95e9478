"""Ranks that save a tensor made of tensors as a DTensor, in shards and in copies."""

from __future__ import annotations

from pathlib import Path

import torch
from packed import Packed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckpt_component import CheckpointError, build_checkpointer


def save(rank: int, world_size: int, folder: Path) -> None:
    """Save copies, and print what the save of shards raises."""
    mesh = init_device_mesh("cpu", (world_size,))
    local = Packed.of(torch.randn(8, generator=torch.Generator().manual_seed(1)))
    with build_checkpointer("sync") as checkpointer:
        copies = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        checkpointer.save({"w": copies}, folder / "copies")
        shards = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        try:
            checkpointer.save({"w": shards}, folder / "shards")
        except CheckpointError as error:
            print(error)
