"""Megatron-core saves in the background with this package's queue, caller, writer and planning.

    torchrun --nproc-per-node 2 tests/megatron/megatron_save.py /tmp/checkpoints

A Megatron training script would change its imports of `AsyncCallsQueue` and of the save strategy to the ones here; the
calls stay as they are. Works without CUDA, which megatron-core's own writer and planning do not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from ckpt_component import AsyncCallsQueue
from ckpt_component.compat.file_system_writer_async import FileSystemWriterAsync
from ckpt_component.compat.plan_cache import CheckpointMetadataCache
from ckpt_component.compat.state_dict_saver import save_state_dict_async_finalize, save_state_dict_async_plan


class SaveStrategy(TorchDistSaveShardedStrategy):
    """Megatron's `torch_dist` format, planned and written by this package."""

    def __init__(self, thread_count: int = 2) -> None:
        super().__init__("torch_dist", 1, thread_count=thread_count)
        self.plans = CheckpointMetadataCache()

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> AsyncRequest:
        """What megatron-core calls; the request goes to whatever queue the training script has."""
        sharded, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        writer = FileSystemWriterAsync(
            checkpoint_dir, thread_count=self.thread_count, separation_hint=self.separation_hint
        )
        planned = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(sharded, False),
            writer,
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
            metadata_cache=self.plans,
        )
        function, preload, args = writer.get_save_function_and_args()
        finalize = [lambda: save_state_dict_async_finalize(*planned)]
        return AsyncRequest(function, tuple(args), finalize, preload_fn=preload)


def sharded_state(rank: int, world: int, value: float) -> dict[str, Any]:
    """A weight cut over the ranks, one that all have, a Python object of each rank, and common values."""
    rows = torch.arange(rank * 4, rank * 4 + 4, dtype=torch.float32).repeat(3, 1).t().contiguous() + value
    return {
        "column": ShardedTensor.from_rank_offsets("decoder.column", rows, (0, rank, world), replica_id=0),
        "alike": ShardedTensor.from_rank_offsets("decoder.alike", torch.full((6,), value), replica_id=rank),
        "rng": ShardedObject("rng_state", {"rank": rank, "value": value}, (world,), (rank,), replica_id=0),
        "iteration": int(value),
    }


def check(folder: Path, rank: int, world: int, value: float) -> None:
    """Megatron-core loads it, and it is what it was when the save was scheduled."""
    target = sharded_state(rank, world, -1.0)
    loaded = dist_checkpointing.load(target, str(folder))
    expected = sharded_state(rank, world, value)
    assert torch.equal(loaded["column"], expected["column"].data), loaded["column"]
    assert torch.equal(loaded["alike"], expected["alike"].data), loaded["alike"]
    assert loaded["rng"] == {"rank": rank, "value": value}
    assert loaded["iteration"] == int(value)


def train(rank: int, world: int, folder: Path, strategy: Any, persistent: bool = True) -> None:
    """Three saves, each while the values already change."""
    calls = AsyncCallsQueue(persistent=persistent, start_timeout=120.0)
    for iteration in range(1, 4):
        path = folder / f"iter_{iteration:07d}"
        if rank == 0:
            path.mkdir(parents=True)
        dist.barrier()
        state = sharded_state(rank, world, float(iteration))
        live = [state["column"].data, state["alike"].data]
        request = dist_checkpointing.save(state, str(path), strategy, async_sharded_save=True)
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
        check(path, rank, world, float(iteration))


def ours(rank: int, world: int, folder: Path) -> None:
    """With our queue, caller, writer and planning."""
    strategy = SaveStrategy()
    train(rank, world, folder, strategy)
    strategy.plans.close()


def megatrons_writer(rank: int, world: int, folder: Path) -> None:
    """With our queue and caller alone; megatron-core's writer and planning need CUDA, which is stood in for."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    train(rank, world, folder, ("torch_dist", 1))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ours(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1]))
    if dist.get_rank() == 0:
        print(f"saved and loaded {sys.argv[1]}")
    dist.destroy_process_group()
