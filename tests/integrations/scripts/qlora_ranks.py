"""QLoRA with FSDP2, whose layers shard the packed weights or leave them alone, on the ranks of `run_ranks`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckpt_component import CheckpointLoadError, build_manager

NN: Any = bitsandbytes.nn


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = NN.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.base(x) + self.up(self.down(x)))


def make(seed: int, *, shards_base: bool) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(Layer(), Layer()).to("cpu")  # quantizes
    ignored = set() if shards_base else {each for each in model.parameters() if not each.requires_grad}
    for layer in (*model, model):
        fully_shard(layer, ignored_params=ignored)
    return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses, x = [], torch.randn(8, 64, generator=torch.Generator().manual_seed(5))
    for _ in range(3):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def resume(rank: int, world_size: int, folder: str) -> None:
    for shards_base in (False, True):
        for frozen in ("keep", "skip"):
            overrides, place = [f"checkpoint.save.frozen={frozen}"], Path(folder, f"{shards_base}", frozen)
            model, optimizer = make(0, shards_base=shards_base)
            train(model, optimizer)
            with build_manager("sync", overrides, dir=place) as manager:
                manager.save(3, {"model": model, "optimizer": optimizer})
            expected = train(model, optimizer)
            model, optimizer = make(1 if frozen == "keep" else 0, shards_base=shards_base)
            with build_manager("sync", overrides, dir=place) as manager:
                assert manager.restore({"model": model, "optimizer": optimizer}) == 3
                assert train(model, optimizer) == expected, (shards_base, frozen)
            if frozen == "skip":
                model, optimizer = make(1, shards_base=shards_base)
                with build_manager("sync", overrides, dir=place) as manager:
                    try:
                        manager.restore({"model": model, "optimizer": optimizer})
                    except CheckpointLoadError as error:
                        print(f"refused: {error}")
