"""Ranks whose model was built on the meta device, sharded with FSDP2, and gets its shards from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from snapshots import MEMORY
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt_component import (
    CheckpointListener,
    CheckpointLoadError,
    CheckpointManager,
    LoadReport,
    build_checkpointer,
    build_manager,
)

OVERRIDES = ["checkpoint.durability=process_crash", "checkpoint.save.at_end=false", "checkpoint.load.prove=on_read"]


class Model(nn.Module):
    """Tied weights whose rows do not divide by the ranks, and buffers of both kinds."""

    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.linspace(0, 1, 6))
        self.register_buffer("scale", torch.linspace(1, 2, 6), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the token that follows."""
        hidden = self.norm(torch.tanh(self.layer(self.embedding(tokens))) * self.scale + self.shift)
        return self.head(hidden)  # type: ignore[no-any-return]


def sharded(device: str) -> dict[str, Any]:
    """The state of a run as a script makes it: shards without values on the meta device."""
    torch.manual_seed(3)
    with torch.device(device):
        model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def train(state: dict[str, Any], steps: range) -> list[float]:
    """The losses of some steps; each rank has data of its own."""
    losses = []
    for step in steps:
        seed = 10 * step + dist.get_rank()
        tokens = torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(seed))
        loss = nn.functional.cross_entropy(state["model"](tokens), tokens.flip(0))
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        losses.append(float(loss.detach()))
    return losses


class Source(CheckpointListener):
    """Where the last restore was from."""

    source: str | None = None

    def on_restored(self, report: LoadReport) -> None:
        """Note it."""
        self.source = report.source


def resume(rank: int, world_size: int, folder: Path) -> None:
    """A run of six steps, and runs that are resumed after three of them, from memory and from the disk."""
    whole = sharded("cpu")
    with build_manager(
        "async_persistent", [*OVERRIDES, *MEMORY, "checkpoint.save.every_steps=100"], dir=folder / "run"
    ) as manager:
        first = sharded("meta")
        assert manager.restore(first) is None
        assert {each.device.type for each in first["model"].parameters()} == {"meta"}
        train(whole, range(1, 4))
        manager.maybe_save(3, whole)  # in memory
        manager.save(3, whole)
        manager.wait()
        right = train(whole, range(4, 7))
        goes_on(manager, right, "memory")
    with build_manager("async_persistent", OVERRIDES, dir=folder / "run") as manager:
        goes_on(manager, right, "storage")


def goes_on(manager: CheckpointManager, right: list[float], source: str) -> None:
    """A new model gets its shards, and trains on as the other did."""
    restored = Source()
    manager.add_listener(restored)
    state = sharded("meta")
    model = state["model"]
    parameters: list[Any] = [*model.parameters()]
    assert manager.restore(state) == 3
    manager.wait()
    assert restored.source == source
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert model.head.weight is model.embedding.weight and model.scale.is_meta
    assert not any(each.is_meta or each.to_local().is_meta for each in parameters)
    model.scale = torch.linspace(1, 2, 6)
    losses = train(state, range(4, 7))
    assert losses == right, (losses, right)


def save(rank: int, world_size: int, folder: Path) -> None:
    """Save after two steps."""
    state = sharded("cpu")
    train(state, range(1, 3))
    with build_checkpointer("sync", OVERRIDES[:1]) as checkpointer:
        checkpointer.save(state, folder / "saved")


def resized(rank: int, world_size: int, folder: Path) -> None:
    """More ranks load what two have saved, as models that have memory do."""
    states = {device: sharded(device) for device in ("cpu", "meta")}
    with build_checkpointer("sync", OVERRIDES[-1:]) as checkpointer:
        for state in states.values():
            checkpointer.load(folder / "saved", state, strict=True)
    states["meta"]["model"].scale = torch.linspace(1, 2, 6)
    right, losses = (train(state, range(3, 6)) for state in states.values())
    assert losses == right


def one_does_not_fit(rank: int, world_size: int, folder: Path) -> None:
    """A parameter of one rank alone is not in the checkpoint: nothing gets memory on any rank."""
    state = sharded("meta")
    if rank == 1:
        with torch.device("meta"):
            state["own"] = nn.Linear(2, 2)
    with build_checkpointer("sync") as checkpointer:
        try:
            checkpointer.load(folder / "saved", state)
        except CheckpointLoadError as error:
            assert "own.weight" in str(error), error
        else:
            raise AssertionError("it was loaded")
    assert {each.device.type for each in state["model"].parameters()} == {"meta"}
