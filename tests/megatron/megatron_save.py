"""Megatron-core saves and loads a sharded state dict; what each function does is run on several ranks.

    torchrun --nproc-per-node 2 tests/megatron/megatron_save.py FOLDER

Runs with megatron-core 0.16 to 0.19, and without CUDA, which megatron-core's own writer and planning do not.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt_component
import ckpt_component.megatron


def sharded_state(rank: int, world: int, value: float) -> dict[str, Any]:
    """A weight cut over the ranks, one that all have, a Python object of each rank, and common values."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    rows = torch.arange(rank * 4, rank * 4 + 4, dtype=torch.float32).repeat(3, 1).t().contiguous() + value
    return {
        "column": ShardedTensor.from_rank_offsets("decoder.column", rows, (0, rank, world), replica_id=0),
        "alike": ShardedTensor.from_rank_offsets("decoder.alike", torch.full((6,), value), replica_id=rank),
        "rng": ShardedObject("rng_state", {"rank": rank, "value": value}, (world,), (rank,), replica_id=0),
        "iteration": int(value),
    }


def check(folder: Path, rank: int, world: int, value: float) -> None:
    """Megatron-core loads it, and it is what it was when the save was scheduled."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(sharded_state(rank, world, -1.0), str(folder))
    expected = sharded_state(rank, world, value)
    assert torch.equal(loaded["column"], expected["column"].data), loaded["column"]
    assert torch.equal(loaded["alike"], expected["alike"].data), loaded["alike"]
    assert loaded["rng"] == {"rank": rank, "value": value}
    assert loaded["iteration"] == int(value)


def new_folder(folder: Path, iteration: int, rank: int) -> Path:
    path = folder / f"iter_{iteration:07d}"
    if rank == 0:
        path.mkdir(parents=True)
    dist.barrier()
    return path


def save(state: dict[str, Any], path: Path, asynchronously: bool, name: str) -> Any:
    """As Megatron's training calls it; `name` is `--async-strategy`, which older releases do not have."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=2, cached_metadata=True)
    options: dict[str, Any] = {"async_strategy": name}
    if "async_strategy" not in inspect.signature(dist_checkpointing.save).parameters:
        options = {}
    return dist_checkpointing.save(state, str(path), strategy, async_sharded_save=asynchronously, **options)


def queue_of_megatron(name: str) -> Any:
    from megatron.core.dist_checkpointing.strategies import async_utils, torch

    if not hasattr(torch, "get_async_strategy"):
        return async_utils.AsyncCallsQueue(persistent=True)
    _, modules = torch.get_async_strategy(name)
    queue = modules["AsyncCallsQueue"](persistent=True)
    modules["AsyncCallsQueue"].warmup_persistent_caller(dist.get_rank(), cpu_priority=10, io_priority=3)
    modules["get_write_results_queue"](mp_mode="fork")
    return queue


def train(rank: int, world: int, folder: Path, calls: Any, name: str) -> None:
    """Three saves, each while the values already change."""
    for iteration in range(1, 4):
        path = new_folder(folder, iteration, rank)
        state = sharded_state(rank, world, float(iteration))
        live = [state["column"].data, state["alike"].data]
        request = save(state, path, True, name)
        assert request is not None
        assert calls.schedule_async_request(request) == iteration - 1
        for weights in live:
            weights.fill_(-5.0)
        calls.maybe_finalize_async_calls(blocking=False)
    calls.maybe_finalize_async_calls(blocking=True)
    calls.close()
    for iteration in range(1, 4):
        path = folder / f"iter_{iteration:07d}"
        assert (path / "metadata.json").exists()
        assert sorted(file.name for file in path.glob("*.distcp"))[:2] == ["__0_0.distcp", "__0_1.distcp"]
        check(path, rank, world, float(iteration))


def nvrx(rank: int, world: int, folder: Path) -> None:
    """Installed before Megatron is imported, asked for as nvrx."""
    ckpt_component.megatron.install()
    train(rank, world, folder, queue_of_megatron("nvrx"), "nvrx")


def mcore(rank: int, world: int, folder: Path) -> None:
    """Asked for as mcore."""
    ckpt_component.megatron.install()
    train(rank, world, folder, queue_of_megatron("mcore"), "mcore")


def installed_late(rank: int, world: int, folder: Path) -> None:
    """Installed when Megatron is imported already, and this module has its class by name."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    globals()["AsyncCallsQueue"] = AsyncCallsQueue
    assert not issubclass(AsyncCallsQueue, ckpt_component.AsyncCallsQueue) and dist_checkpointing
    ckpt_component.megatron.install()
    ckpt_component.megatron.install()
    calls = queue_of_megatron("nvrx")
    assert type(calls) is globals()["AsyncCallsQueue"]
    train(rank, world, folder, calls, "nvrx")


def synchronous(rank: int, world: int, folder: Path) -> None:
    """A save that Megatron waits for."""
    ckpt_component.megatron.install()
    path = new_folder(folder, 1, rank)
    assert save(sharded_state(rank, world, 1.0), path, False, "mcore") is None
    check(path, rank, world, 1.0)


def megatrons_writer(rank: int, world: int, folder: Path) -> None:
    """Our queue alone; megatron-core's writer and planning need CUDA, which is stood in for."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    train(rank, world, folder, ckpt_component.AsyncCallsQueue(persistent=True, start_timeout=120.0), "mcore")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    nvrx(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1]))
    if dist.get_rank() == 0:
        print(f"saved and loaded {sys.argv[1]}")
    dist.destroy_process_group()
