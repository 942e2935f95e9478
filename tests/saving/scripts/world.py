"""What the ranks of test_world run: every function takes (rank, world size, folder) and asserts on each rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalShard, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_component import (
    CheckpointError,
    CheckpointManager,
    CheckpointStageError,
    CheckpointWorldError,
    build_checkpointer,
    build_manager,
)

WHOLE = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)


def leave() -> Any:
    """Destroy the process group; returns the store for the next one."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    return store


def join(store: Any, rank: int, world_size: int) -> None:
    """Initialize a process group again."""
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world_size)


def rows(ranks: list[int] | None = None) -> DTensor:
    """A sharded tensor, on all ranks or on some."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if ranks is None else DeviceMesh("cpu", ranks)
    return distribute_tensor(WHOLE, mesh, [Shard(0)])


def committed(folder: Path) -> list[str]:
    """What every checkpoint has, and attempts that are not over."""
    dist.barrier()
    return sorted(str(path.parent.relative_to(folder)) for path in folder.rglob("manifest.json"))


def manager_before_the_group(rank: int, world_size: int, folder: Path) -> None:
    """Nothing can be done with it, and each rank says so by itself; one that is built after the group works."""
    store = leave()
    early = build_manager("async_persistent", dir=folder / "run")
    checkpointer = build_checkpointer("sync")
    join(store, rank, world_size)
    state: dict[str, Any] = {"rows": rows(), "plain": torch.zeros(3)}
    calls: list[Callable[[], Any]] = [
        lambda: early.restore(state),
        lambda: early.maybe_save(1, state),
        lambda: early.save(1, state),
        lambda: early.prewarm(state),
        lambda: checkpointer.save(state, folder / "path"),
        lambda: checkpointer.load(folder / "path"),
    ]
    for call in calls:
        with pytest.raises(CheckpointWorldError, match=f"{world_size} ranks, after .* after init_process_group"):
            call()
    early.close()
    checkpointer.close()
    assert committed(folder) == []
    with build_manager("async_persistent", dir=folder / "run") as manager:
        assert manager.save(1, state)
        manager.wait()
    assert committed(folder) == ["run/iter_0000001"]


def group_made_again(rank: int, world_size: int, folder: Path) -> None:
    """The ranks go on to know each other without a group; with another one they need another manager."""
    state = {"rows": rows()}
    manager = build_manager("async_persistent", dir=folder / "run")
    manager.save(1, state)
    store = leave()
    manager.save(2, state)
    manager.wait()
    join(store, rank, world_size)
    calls: list[Callable[[], Any]] = [
        lambda: manager.save(3, state),
        lambda: manager.maybe_save(3, state),
        lambda: manager.restore(state),
        lambda: manager.prewarm(state),
    ]
    for call in calls:
        with pytest.raises(CheckpointWorldError, match="destroyed and initialized again.* build a new one"):
            call()
    manager.close()
    assert committed(folder) == ["run/iter_0000001", "run/iter_0000002"]
    state = {"rows": rows()}
    state["rows"].to_local().zero_()
    with build_manager("async_persistent", dir=folder / "run") as manager:
        assert manager.restore(state) == 2
    assert torch.equal(state["rows"].full_tensor(), WHOLE)


def group_of_one(rank: int, world_size: int, folder: Path) -> None:
    """One rank before and after is no other world, whatever was built and destroyed."""
    store = leave()
    manager = build_manager("async_persistent", dir=folder / "run")
    join(store, rank, world_size)
    assert manager.restore({"plain": torch.ones(2)}) is None and manager.save(1, {"plain": torch.ones(2)})
    manager.close()
    assert committed(folder) == ["run/iter_0000001"]


def group_gone_before_close(rank: int, world_size: int, folder: Path) -> None:
    """Saves that were started before are committed, as is the one at the end."""
    state = {"rows": rows(), "large": torch.ones(1 << 20)}
    with build_manager("async_persistent", ["checkpoint.save.every_steps=2"], dir=folder / "run") as manager:
        assert manager.maybe_save(2, state) and not manager.maybe_save(3, state)
        store = leave()
        before = time.monotonic()
    assert time.monotonic() - before < 60
    assert [report.outcome for report in manager.reports] == ["committed", "committed"]
    join(store, rank, world_size)
    assert committed(folder) == ["run/iter_0000002", "run/iter_0000003"]


def alone_with_parts(rank: int, world_size: int, folder: Path) -> None:
    """Checkpointers of one rank each get tensors whose other parts no one saves."""
    placed = rows()
    local = WHOLE[rank : rank + 1] if rank < world_size - 1 else WHOLE[rank:]
    parts = init_from_local_shards([LocalShard.from_tensor_and_offsets(local.clone(), [rank, 0], rank)], [7, 5])
    empty = init_from_local_shards(
        [LocalShard.from_tensor_and_offsets(torch.ones(2), [0], rank)] if rank == 1 else [], [2]
    )
    store = leave()
    with build_checkpointer("sync") as checkpointer:
        with pytest.raises(CheckpointStageError, match=r"'m\.rows' .* a part on rank 2, .* built for 1 rank"):
            checkpointer.save({"m": {"rows": placed}}, folder / f"dtensor-{rank}")
        with pytest.raises(CheckpointStageError, match=r"'m\.rows' has a hole.* All ranks"):
            checkpointer.save({"m": {"rows": parts}}, folder / f"sharded-{rank}")
        if rank != 1:
            with pytest.raises(CheckpointStageError, match=r"'m\.rows' is spread over ranks"):
                checkpointer.save({"m": {"rows": empty}}, folder / f"empty-{rank}")
        checkpointer.save({"plain": torch.ones(2)}, folder / f"whole-{rank}")
    join(store, rank, world_size)
    assert committed(folder) == [f"whole-{number}" for number in range(world_size)]


class Model:
    """An object with a tensor on some of the ranks."""

    def __init__(self, weight: DTensor) -> None:
        self.weight = weight
        self.taken: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state


def mesh_of_a_subgroup(rank: int, world_size: int, folder: Path) -> None:
    """What some of the ranks hold is saved by them, and loaded by them."""

    def state() -> dict[str, Any]:
        return {
            "rows": rows([0, 2]),
            "same": distribute_tensor(WHOLE, DeviceMesh("cpu", [1, 2]), [Replicate()]),
            "scalar": distribute_tensor(torch.tensor(2.5), DeviceMesh("cpu", [1, 2]), [Replicate()]),
            "model": Model(rows([1])),
            "plain": torch.ones(3),
        }

    with build_checkpointer("async_persistent") as checkpointer:
        saved = checkpointer.save(state(), folder / "good")
        assert saved is not None and saved[1].result(60).outcome == "committed"
        target = state()
        for value in (target["rows"], target["same"], target["scalar"], target["model"].weight, target["plain"]):
            (value.to_local() if isinstance(value, DTensor) else value).zero_()
        checkpointer.load(folder / "good", target, strict=True, allow_unexpected=False)
        assert target["model"].taken == {"weight": target["model"].weight}
        expected = state()
        for key in ("rows", "same", "scalar"):
            assert torch.equal(target[key].to_local(), expected[key].to_local())
        assert torch.equal(target["model"].weight.to_local(), expected["model"].weight.to_local())
        # The ranks of the mesh leave it out, one of them or all.
        for number, text in ((2, "'rows' has a hole"), (0, "'rows' is spread over ranks")):
            broken = {"plain": torch.ones(3), "rows": rows([0, 2])}
            if rank == 2 or (rank == 0 and number == 0):
                del broken["rows"]
            saved = checkpointer.save(broken, folder / f"bad-{number}")
            assert saved is not None
            with pytest.raises(CheckpointStageError, match=text):
                saved[1].result(60)
        again = checkpointer.save(state(), folder / "again")
        assert again is not None and again[1].result(60).outcome == "committed"
    assert committed(folder) == ["again", "good"]


def other_shapes(rank: int, world_size: int, folder: Path) -> None:
    """Tensors of one key that differ by rank in more than values."""
    differ: list[tuple[dict[str, Any], str]] = [
        ({"w": torch.zeros(3 + rank)}, r"'w' is float32 \(3,\) on one rank and float32 \(4,\) on another"),
        ({"w": torch.zeros(3, dtype=torch.float64 if rank else None)}, "'w' is float32 .* and float64"),
        ({"w": torch.zeros(3) if rank else 3}, "'w' is a tensor on one rank and a Python object on another"),
    ]
    with build_checkpointer("async_persistent") as checkpointer:
        for state, text in differ:
            saved = checkpointer.save({"plain": torch.ones(3), **state}, folder / "bad")
            assert saved is not None
            with pytest.raises(CheckpointStageError, match=text):
                saved[1].result(60)
    assert committed(folder) == []
    assert [name for name in os.listdir(folder) if name.startswith(("bad", ".ckpt"))] == []


def one_rank_before_the_group(rank: int, world_size: int, folder: Path) -> None:
    """One rank built its manager too early: it refuses, and the others hear that it is not there."""
    store = leave()
    manager: CheckpointManager | None = build_manager("sync", dir=folder / "run") if rank == 1 else None
    join(store, rank, world_size)
    state = {"rows": rows()}
    if manager is not None:
        with pytest.raises(CheckpointWorldError):
            manager.save(1, state)
        manager.close()
    else:
        with pytest.raises(CheckpointError, match="Timed out waiting"):
            build_manager(
                "sync", ["checkpoint.timeouts.stage=1", "checkpoint.timeouts.visible=0.5"], dir=folder / "run"
            )
    assert committed(folder) == []
