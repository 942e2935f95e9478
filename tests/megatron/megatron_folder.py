"""Megatron-core saves a `torch_dist` folder with its own writer, without CUDA, which is stood in for."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject

LAYERS = 2
QKV = "decoder.layers.self_attention.linear_qkv.weight"


def rows(layer: int, rank: int) -> torch.Tensor:
    """The part of one layer's weight that a rank has."""
    return torch.arange(12.0).view(4, 3) + 100 * layer + 1000 * rank


def sharded_state(rank: int, world: int) -> dict[str, Any]:
    """Layers stacked into one tensor and cut over the ranks, a weight of all, an object of each rank, common values."""
    state: dict[str, Any] = {
        f"layers.{layer}.qkv": ShardedTensor.from_rank_offsets(
            QKV, rows(layer, rank), (0, layer, LAYERS), (1, rank, world), prepend_axis_num=1, replica_id=0
        )
        for layer in range(LAYERS)
    }
    norm = torch.full((6,), 2.5, dtype=torch.bfloat16)
    state["norm"] = ShardedTensor.from_rank_offsets("decoder.final_layernorm.weight", norm, replica_id=rank)
    state["rng"] = ShardedObject("rng_state", {"rank": rank, "t": torch.arange(3)}, (world,), (rank,), replica_id=0)
    state["args"] = argparse.Namespace(lr=1.0)
    state["optimizer"] = {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]}
    return {**state, "iteration": 100}


def save(rank: int, world: int, root: Path) -> None:
    """Save it as a training run does, with the pointer file."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    folder = root / "saved" / "iter_0000100"
    if rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(sharded_state(rank, world), str(folder), ("torch_dist", 1))
    if rank == 0:
        (folder.parent / "latest_checkpointed_iteration.txt").write_text("100")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    save(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path("megatron"))
    dist.destroy_process_group()
