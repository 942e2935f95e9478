"""Frozen parameters that are left out, in DDP and FSDP2, on other numbers of ranks, and from another base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckpt_component import CheckpointLoadError, build_manager

LAYERS = 3
WIDTH = 33
Made = tuple[nn.Module, torch.optim.Optimizer]


class Layer(nn.Module):
    """A frozen layer, whose parameters no number of ranks divides, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.adapter.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.adapter(self.base(x)))


def make(kind: str, seed: int = 0) -> Made:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    if kind == "fsdp2":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2, foreach=False)


def train(made: Made, steps: int = 2) -> list[float]:
    model, optimizer = made
    x, losses = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH), []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def save(rank: int, world_size: int, folder: str) -> None:
    """Save two steps of each kind, and note the losses that follow."""
    for kind in ("ddp", "fsdp2"):
        made = make(kind)
        train(made)
        with build_manager("sync", ["checkpoint.save.frozen=skip"], dir=Path(folder, kind)) as manager:
            manager.save(2, {"model": made[0], "optimizer": made[1]})
            train(made, 1)
            manager.save(3, {"model": made[0], "optimizer": made[1]})
        losses = train(made)
        if rank == 0:
            Path(folder, f"{kind}.json").write_text(json.dumps(losses))


def resume(rank: int, world_size: int, folder: str) -> None:
    """Resume each kind as each kind, and be refused with another base, on all ranks; nothing is filled then."""
    for saved in ("ddp", "fsdp2"):
        for kind in ("ddp", "fsdp2") if world_size > 1 else ("plain",):
            place, expected = Path(folder, saved), json.loads(Path(folder, f"{saved}.json").read_text())
            settings = ["checkpoint.save.frozen=skip", "checkpoint.save.at_end=false"]
            made = make(kind)
            with build_manager("sync", settings, dir=place) as manager:
                assert manager.restore({"model": made[0], "optimizer": made[1]}) == 3
            torch.testing.assert_close(train(made), expected, rtol=1e-5, atol=1e-7)
            other = make(kind)
            weight: Any = other[0].get_parameter(f"{'module.' if kind == 'ddp' else ''}1.base.weight")
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            if rank == 0:  # of a sharded one, a part
                with torch.no_grad():
                    local[0, 3] += 1e-3
            before = [each.detach().clone() for each in other[0].parameters()]
            with build_manager("sync", settings, dir=place) as manager:
                try:
                    manager.restore({"model": other[0], "optimizer": other[1]})
                except CheckpointLoadError as error:
                    print(str(error))
                else:
                    raise AssertionError("another base was accepted")
            assert all(torch.equal(one, each) for one, each in zip(before, other[0].parameters(), strict=True))
