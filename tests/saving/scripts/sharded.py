"""What the ranks of test_ranks run: every function takes (rank, world size, folder) and asserts on each rank."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_component import (
    CheckpointExistsError,
    CheckpointLoadError,
    PerRank,
    RanksError,
    build_checkpointer,
    build_manager,
)
from ckpt_component.testing import faults

WHOLE = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)


def sharded_state(world_size: int) -> dict[str, Any]:
    """Uneven and empty shards, two-dimensional ones where there are four ranks, replicated and plain tensors."""
    mesh = init_device_mesh("cpu", (world_size,))
    state: dict[str, Any] = {
        "rows": distribute_tensor(WHOLE, mesh, [Shard(0)]),
        "columns": distribute_tensor(WHOLE + 100, mesh, [Shard(1)]),
        "few": distribute_tensor(torch.arange(1, 3), mesh, [Shard(0)]),
        "alike": distribute_tensor(WHOLE - 50, mesh, [Replicate()]),
        "plain": {"weights": [torch.arange(1000, dtype=torch.int16), torch.zeros(0)], "scale": torch.tensor(2.5)},
        "step": 12,
    }
    if world_size == 4:
        square = init_device_mesh("cpu", (2, 2))
        state["square"] = distribute_tensor(WHOLE * 3, square, [Shard(0), Shard(1)])
    else:
        state["square"] = distribute_tensor(WHOLE * 3, mesh, [Shard(0)])
    return state


def wiped(state: Any) -> Any:
    """The same structure without the values."""
    if isinstance(state, dict):
        return {key: wiped(value) for key, value in state.items()}
    if isinstance(state, list):
        return [wiped(value) for value in state]
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def check(state: dict[str, Any]) -> None:
    """Every value is what `sharded_state` has."""
    for key, value in {"rows": WHOLE, "columns": WHOLE + 100, "few": torch.arange(1, 3), "alike": WHOLE - 50}.items():
        found = state[key]
        assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, value), key
    square = state["square"]
    assert torch.equal(square.full_tensor() if isinstance(square, DTensor) else square, WHOLE * 3)
    assert torch.equal(state["plain"]["weights"][0], torch.arange(1000, dtype=torch.int16))
    assert state["plain"]["scale"] == 2.5 and state["step"] == 12


def save_sharded(rank: int, world_size: int, folder: Path) -> None:
    """Save with every stager that can; each is overwritten at once after it, and loaded back."""
    for stager, caller in (("shared_memory", "persistent"), ("zero_overhead", "temporal"), ("none", "inline")):
        overrides = [f"checkpoint/stager={stager}", f"checkpoint/caller={caller}"]
        with build_checkpointer("async_persistent", overrides) as checkpointer:
            state = sharded_state(world_size)
            futures = checkpointer.save(state, folder / stager)
            checkpointer.wait_staged()
            for key in ("rows", "columns", "few", "alike", "square"):
                state[key].to_local().fill_(-1)
            if futures is not None:
                assert futures[1].result(60).outcome == "committed"
            target = wiped(sharded_state(world_size))
            checkpointer.load(folder / stager, target, strict=True)
            check(target)


def load_sharded(rank: int, world_size: int, folder: Path) -> None:
    """Load what another number of ranks saved."""
    with build_checkpointer("sync") as checkpointer:
        target = wiped(sharded_state(world_size))
        checkpointer.load(folder / "shared_memory", target, strict=True)
        check(target)


def stock_and_fsdp(rank: int, world_size: int, folder: Path) -> None:
    """Stock `dcp.save` loads here, by parts; and a module under FSDP2 with its optimizer comes back, here and elsewhere."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    dcp.save(sharded_state(world_size), checkpoint_id=folder / "stock")
    with build_checkpointer("async_persistent") as checkpointer:
        target = wiped(sharded_state(world_size))
        checkpointer.load(folder / "stock", target, strict=True)
        check(target)

        def job(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(seed)
            module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
            fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))
            return module, torch.optim.AdamW(module.parameters(), lr=0.1)

        def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
            optimizer.zero_grad()
            loss = module(torch.ones(2, 5)).square().sum()
            loss.backward()
            optimizer.step()
            return float(loss.item())

        module, optimizer = job(1)
        train(module, optimizer)
        futures = checkpointer.save({"model": module, "optimizer": optimizer}, folder / "fsdp")
        assert futures is not None
        futures[1].result(60)
        losses = [train(module, optimizer) for _ in range(3)]
        other, its_optimizer = job(2)
        checkpointer.load(folder / "fsdp", {"model": other, "optimizer": its_optimizer}, strict=True)
        assert [train(other, its_optimizer) for _ in range(3)] == losses


def own_values(rank: int, world_size: int, folder: Path) -> None:
    """Per-rank values come back by rank; with another number of ranks by the policy."""
    saved_by = int(os.environ["SAVED_BY"])

    def state(number: int) -> dict[str, Any]:
        return {
            "first": PerRank({"seed": number, "noise": torch.full((3,), float(number))}, "first"),
            "keep": PerRank(number, "keep"),
            "strict": PerRank(number),
        }

    with build_checkpointer("async_persistent") as checkpointer:
        if saved_by == world_size:
            futures = checkpointer.save(state(rank), folder / "own")
            assert futures is not None
            futures[1].result(60)
            target = state(99)
            checkpointer.load(folder / "own", target, strict=True)
            assert target["strict"].value == target["keep"].value == target["first"].value["seed"] == rank
            assert target["first"].value["noise"].eq(rank).all()
            return
        target = state(99)
        with pytest.raises(CheckpointLoadError, match="differs by rank"):
            checkpointer.load(folder / "own", target)
        del target["strict"]
        checkpointer.load(folder / "own", target, strict=True)
        assert target["keep"].value == 99 and target["first"].value["seed"] == 0
        assert target["first"].value["noise"].eq(0).all()


def failures(rank: int, world_size: int, folder: Path) -> None:
    """Whatever fails on one rank is the same error on all, nothing is visible, and the next save works."""
    state: dict[str, Any] = {"weight": torch.full((1000,), 3.0), "mine": PerRank(torch.full((10,), float(rank)))}
    with build_checkpointer("async_persistent") as checkpointer:

        def works(name: str) -> None:
            futures = checkpointer.save(state, folder / name)
            assert futures is not None and futures[1].result(60).outcome == "committed"

        works("one")
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(state, folder / "one")
        # A tensor that cannot be saved is seen before anything begins, an object when it is encoded.
        meta = torch.empty(2, device="meta")
        with pytest.raises(RanksError, match="rank 1: CheckpointStageError.*odd") as caught:
            checkpointer.save({**state, "odd": meta} if rank == 1 else state, folder / "two")
        assert set(caught.value.failures) == {1}
        futures = checkpointer.save({**state, "odd": object()} if rank == 1 else state, folder / "two")
        assert futures is not None
        with pytest.raises(RanksError, match=r"Rank 1 failed\. rank 1: .*odd"):
            futures[1].result(60)
        works("two")
        # A writer process that is killed with its job.
        with faults.at("write").kills("writer") if rank == 1 else nullcontext():
            futures = checkpointer.save(state, folder / "three")
            assert futures is not None
            with pytest.raises(RanksError, match=r"Rank 1 failed.*SIGKILL"):
                futures[1].result(60)
        works("three")
        # An error that nobody asked for is told at the next save, on all ranks.
        full = faults.at("publish").raises(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with full if rank == 0 else nullcontext():
            futures = checkpointer.save(state, folder / "four")
            assert futures is not None
            assert futures[0].result(60) is None
            while not futures[1].done():
                checkpointer.wait_staged(1)
        with pytest.raises(Exception, match="No space left"):
            checkpointer.save(state, folder / "four")
        works("four")
        # A structure that changes on one rank alone.
        state["mine"] = PerRank(torch.full((10 + 5 * rank,), float(rank)))
        works("five")
        target: dict[str, Any] = {"weight": torch.zeros(1000), "mine": PerRank(torch.zeros(10 + 5 * rank))}
        checkpointer.load(folder / "five", target, strict=True)
        assert target["mine"].value.eq(rank).all() and target["weight"].eq(3).all()
    torch.distributed.barrier()
    left = sorted(name for name in os.listdir(folder) if not name.startswith("meeting"))
    assert left == ["five", "four", "one", "three", "two"]


def managed(rank: int, world_size: int, folder: Path) -> None:
    """The manager on several ranks: policy, retention, resume, and a damaged newest checkpoint."""
    root = folder / "run"

    def state() -> dict[str, Any]:
        return {"weight": torch.zeros(1000), "other": torch.zeros(2000), "rank": PerRank(rank)}

    overrides = ["checkpoint.save.every_steps=2", "checkpoint.keep.last=2", "checkpoint.overlap=skip"]
    with build_manager("async_persistent", overrides, dir=root) as manager:
        assert manager.restore(state()) is None
        current = state()
        for step in range(1, 8):
            current["weight"].fill_(step)
            assert manager.maybe_save(step, current) == (step % 2 == 0)
            manager.wait()
    with build_manager("sync", dir=root) as manager:
        assert manager.steps() == [6, 7]
        target = state()
        assert manager.restore(target) == 7
        assert target["weight"].eq(7).all() and target["rank"].value == rank
    torch.distributed.barrier()
    if rank == 0:
        # Rank 0 stores one tensor and rank 1 the other, and all read all: both notice.
        data = next(path for path in sorted((root / "iter_0000007").glob("__1_*.distcp")) if path.stat().st_size > 3000)
        whole = bytearray(data.read_bytes())
        whole[2000] ^= 1
        data.write_bytes(whole)
    torch.distributed.barrier()
    with build_manager("sync", ["checkpoint.save.at_end=false"], dir=root) as manager:
        target = state()
        assert manager.restore(target) == 6
        assert target["weight"].eq(6).all()


def on_cuda(rank: int, world_size: int, folder: Path) -> None:
    """Shards on CUDA devices under NCCL: saved in the background, overwritten at once after, and loaded back."""
    mesh = init_device_mesh("cuda", (world_size,))
    for stager in ("pinned", "zero_overhead", "shared_memory"):
        rows = distribute_tensor(WHOLE.cuda(), mesh, [Shard(0)])
        state: dict[str, Any] = {"rows": rows, "alike": torch.full((1000,), 3.0, device="cuda"), "rank": PerRank(rank)}
        with build_checkpointer("async_persistent", [f"checkpoint/stager={stager}"]) as checkpointer:
            futures = checkpointer.save(state, folder / stager)
            assert futures is not None
            checkpointer.wait_staged()
            rows.to_local().fill_(-1)
            state["alike"].fill_(-1)
            assert futures[1].result(60).outcome == "committed"
            checkpointer.load(folder / stager, state, strict=True)
        assert torch.equal(rows.full_tensor().cpu(), WHOLE), stager
        assert state["alike"].eq(3).all() and state["rank"].value == rank


def step_during_copies(rank: int, world_size: int, folder: Path) -> None:
    """Steps of `foreach` leave no trace in the version counters of DTensors, so no copy of those overlaps with a step."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    plain = PerRank(torch.ones(1000))  # there is something to copy later in each case
    states: dict[str, dict[str, Any]] = {
        "guarded": {"model": model, "optimizer": optimizer, "plain": plain},
        "unguarded": {"model": model, "plain": plain},
    }
    with build_checkpointer("async_zero_overhead") as ours:
        for name in ("unguarded", "guarded"):
            model(torch.ones(2, 64)).square().sum().backward()
            expected = {key: value.full_tensor().clone() for key, value in model.state_dict().items()}
            waits = faults.at("copy").holds() if name == "unguarded" else nullcontext()
            with waits:
                _, write = ours.save(states[name], folder / name)  # type: ignore[misc]
                optimizer.step()
                optimizer.zero_grad()
            write.result(60)
            assert not torch.equal(model.state_dict()["0.weight"].full_tensor(), expected["0.weight"])
            found = ours.load(folder / name, {"model": wiped(model.state_dict())})["model"]
            assert all(torch.equal(found[key].full_tensor(), value) for key, value in expected.items()), name
