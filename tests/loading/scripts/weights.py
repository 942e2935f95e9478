"""What the ranks of test_weights run: every function takes (rank, world size, folder) and asserts on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt_component import (
    CheckpointLoadError,
    CheckpointNotFoundError,
    build_checkpointer,
    build_manager,
    load_weights,
)
from ckpt_component.factory import weights
from ckpt_component.formats.checkpoints import find_checkpoint


def net(value: float, mesh: Any = None) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    for number, parameter in enumerate(model.parameters()):
        parameter.data.copy_(value + number + torch.arange(parameter.numel()).view_as(parameter))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model


def check(model: torch.nn.Module, value: float) -> None:
    for found, wanted in zip(model.parameters(), net(value).parameters(), strict=True):
        assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, wanted)


def sharded(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model = net(100.0, mesh)
    with build_manager("async_persistent", dir=folder / "run") as manager:
        manager.save(5, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    for target in (net(0.0, mesh), net(0.0)):
        assert load_weights(target, folder / "run") == 5
        check(target, 100.0)
    if rank == 0:
        torch.save(net(200.0).state_dict(), folder / "weights.pt")
    torch.distributed.barrier()
    target = net(0.0, mesh)
    assert load_weights(target, folder / "weights.pt", key="") is None
    check(target, 200.0)


def they_agree_on_the_newest(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 looks later, when there is one more."""
    with build_checkpointer("sync", alone=True) as checkpointer:
        if rank == 0:
            for step in (1, 2):
                checkpointer.save({"model": net(float(step))}, folder / f"iter_{step:07}")
    torch.distributed.barrier()
    find = find_checkpoint
    with mock.patch.object(weights, "find_checkpoint", lambda path, _: find(f"{path}@{2 - rank}")):
        for _ in range(2):
            model = net(0.0)
            assert load_weights(model, folder) == 2
            check(model, 2.0)


def one_rank_alone(rank: int, world_size: int, folder: Path) -> None:
    if rank == 1:
        with build_checkpointer("sync", alone=True) as checkpointer:
            checkpointer.save({"model": net(1.0)}, folder / "iter_0000001")
        for path in (folder, folder / "iter_0000001"):
            model = net(0.0)
            assert load_weights(model, path, alone=True) == 1
            check(model, 1.0)
    torch.distributed.barrier()
    model = net(0.0)
    assert load_weights(model, folder) == 1
    check(model, 1.0)


def one_rank_fails(rank: int, world_size: int, folder: Path) -> None:
    """All get an error, of the same type, and the one that failed its own; the next call of all is not disturbed."""
    path = folder / "iter_0000001"
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save({"model": net(1.0)}, path)
    with pytest.raises(CheckpointNotFoundError) as missed:
        load_weights(net(0.0), folder / "nothing" if rank else path)
    with pytest.raises(CheckpointLoadError) as unlike:
        load_weights(torch.nn.Linear(3, 5) if rank else net(0.0), path)
    for caught in (missed, unlike):
        assert str(caught.value).startswith("Rank 1: ") == (rank == 0)
    model = net(0.0)
    assert load_weights(model, path) == 1
    check(model, 1.0)
