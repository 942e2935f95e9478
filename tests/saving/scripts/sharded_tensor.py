"""What the ranks of test_sharded_tensor run: every function takes (rank, world size, folder) and asserts on each rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType

from ckpt_component import RanksError, build_checkpointer

WHOLE = torch.arange(9 * 4, dtype=torch.float32).reshape(9, 4)
FEW = torch.arange(2, dtype=torch.int64)


def cut(whole: torch.Tensor, rank: int, world_size: int, dimension: int = 0) -> ShardedTensor:
    """Every `world_size`-th slice is a part of its own: several parts on a rank, and none on some."""
    shards = []
    for number in range(rank, whole.shape[dimension], world_size):
        offsets = [0] * whole.dim()
        offsets[dimension] = number
        shards.append(Shard.from_tensor_and_offsets(whole.narrow(dimension, number, 1).clone(), offsets, rank))
    return init_from_local_shards(shards, list(whole.shape))


def in_blocks(whole: torch.Tensor, rank: int, world_size: int) -> ShardedTensor:
    """One part a rank, as FSDP makes them."""
    size = -(-whole.shape[0] // world_size)
    part = whole[rank * size : (rank + 1) * size].clone()
    start = min(rank * size, whole.shape[0])
    return init_from_local_shards([Shard.from_tensor_and_offsets(part, [start, 0], rank)], list(whole.shape))


def state_of(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "rows": cut(WHOLE, rank, world_size),
        "columns": cut(WHOLE + 100, rank, world_size, 1),
        "blocks": in_blocks(WHOLE - 50, rank, world_size),
        "list": [cut(FEW, rank, world_size)],
        "plain": torch.ones(3),
        "step": 4,
    }


def tensors_of(state: dict[str, Any]) -> dict[str, ShardedTensor]:
    return {key: state[key] for key in ("rows", "columns", "blocks")} | {"few": state["list"][0]}


def wiped(rank: int, world_size: int) -> dict[str, Any]:
    state = state_of(rank, world_size)
    for tensor in tensors_of(state).values():
        for shard in tensor.local_shards():
            shard.tensor.fill_(-1)
    state["plain"].zero_()
    return {**state, "step": 0}


def check(found: dict[str, Any], rank: int, world_size: int) -> None:
    expected = tensors_of(state_of(rank, world_size))
    for key, tensor in tensors_of(found).items():
        parts = zip(tensor.local_shards(), expected[key].local_shards(), strict=True)
        assert all(torch.equal(one.tensor, other.tensor) for one, other in parts), key
    assert found["plain"].eq(1).all() and found["step"] == 4


def both_ways(rank: int, world_size: int, folder: Path) -> None:
    """Ours by stock DCP and by ours, stock's by ours."""
    warnings.simplefilter("error", FutureWarning)  # torch says so wherever more than the shards is asked for
    with build_checkpointer("async_persistent") as checkpointer:
        for stager in (1, 2):  # planned, and planned already
            saved = checkpointer.save(state_of(rank, world_size), folder / f"ours-{stager}")
            assert saved is not None and saved[1].result(60).outcome == "committed"
        target = wiped(rank, world_size)
        assert checkpointer.load(folder / "ours-2", target, strict=True, allow_unexpected=False) is target
        check(target, rank, world_size)
        warnings.simplefilter("ignore", FutureWarning)
        dcp.save(state_of(rank, world_size), checkpoint_id=folder / "stock")
        warnings.simplefilter("error", FutureWarning)
        target = wiped(rank, world_size)
        checkpointer.load(folder / "stock", target, strict=True, allow_unexpected=False)
        check(target, rank, world_size)
    warnings.simplefilter("ignore", FutureWarning)
    target = wiped(rank, world_size)
    dcp.load(target, checkpoint_id=folder / "ours-1")
    check(target, rank, world_size)


def refused(rank: int, world_size: int, folder: Path) -> None:
    """Where its parts cannot be told: by key."""
    warnings.simplefilter("error", FutureWarning)
    texts: list[tuple[str, dict[str, Any], str]] = [
        ("dcp", {"a": (1, cut(WHOLE, rank, world_size))}, "'a' holds a ShardedTensor in a tuple.* dict or a list"),
        ("torch_save", {"a": cut(WHOLE, rank, world_size)}, r"'a' is a part .*\(9, 4\).*writer=dcp"),
        ("safetensors", {"a": cut(FEW, rank, world_size)}, "'a' is a tensor of other ranks.*writer=dcp"),
    ]
    for writer, state, text in texts:
        overrides = [f"checkpoint/writer={writer}"]
        with build_checkpointer("sync", overrides) as checkpointer, pytest.raises(RanksError, match=text):
            checkpointer.save(state, folder / writer)
    dist.barrier()
    assert not any((folder / writer).exists() for writer, *_ in texts)


def resharded(rank: int, world_size: int, folder: Path) -> None:
    """Another number of ranks, into shards and into whole tensors."""
    with build_checkpointer("sync") as checkpointer:
        for name in ("ours-1", "stock"):
            target = wiped(rank, world_size)
            checkpointer.load(folder / name, target, strict=True)
            check(target, rank, world_size)
            whole: dict[str, Any] = {"rows": torch.zeros(9, 4), "list": [torch.zeros(2, dtype=torch.int64)]}
            checkpointer.load(folder / name, whole, strict=True)
            assert torch.equal(whole["rows"], WHOLE) and torch.equal(whole["list"][0], FEW)


def fsdp(rank: int, world_size: int, folder: Path) -> None:
    """A module under FSDP1 with sharded state dicts comes back, given as a dict and as an object."""

    def job(seed: int) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
        wrapped = FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)
        FullyShardedDataParallel.set_state_dict_type(
            wrapped, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
        )
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.1)

    def train(module: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> float:
        optimizer.zero_grad()
        loss = module(torch.ones(2, 5)).square().sum()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    warnings.simplefilter("ignore", FutureWarning)
    module, optimizer = job(1)
    train(module, optimizer)
    with build_checkpointer("async_persistent") as checkpointer:
        state = {"model": module, "optimizer": FullyShardedDataParallel.optim_state_dict(module, optimizer)}
        kinds = {type(value) for value in module.state_dict().values()}
        assert kinds == {ShardedTensor}
        saved = checkpointer.save(state, folder / "fsdp")
        assert saved is not None
        saved[1].result(60)
        losses = [train(module, optimizer) for _ in range(3)]
        other, its_optimizer = job(2)
        train(other, its_optimizer)
        target: dict[str, Any] = {
            "model": other,
            "optimizer": FullyShardedDataParallel.optim_state_dict(other, its_optimizer),
        }
        checkpointer.load(folder / "fsdp", target, strict=True)
    its_state = FullyShardedDataParallel.optim_state_dict_to_load(other, its_optimizer, target["optimizer"])
    its_optimizer.load_state_dict(its_state)
    assert [train(other, its_optimizer) for _ in range(3)] == losses
    dist.barrier()
