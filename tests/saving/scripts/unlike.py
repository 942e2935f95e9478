"""What the ranks of test_unlike run: values that are said to be alike and are not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckpt_component import CheckpointManager, PerRank, build_manager


def manager_in(folder: Path, *overrides: str) -> CheckpointManager:
    return build_manager("async_persistent", ["checkpoint.save.at_end=false", *overrides], dir=folder)


def save(manager: CheckpointManager, step: int, state: dict[str, Any]) -> None:
    assert manager.save(step, state)
    manager.wait()


class Warnings(logging.StreamHandler):  # type: ignore[type-arg]  # which Python 3.10 has not
    """Prints warnings, and collects those that name values of which only one rank's is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if "only one rank's value is saved" in record.getMessage():
            self.lines.append(record.getMessage())


def warned(manager: CheckpointManager, steps: list[int], state_of: Any) -> list[int]:
    """At which of the steps this rank warned."""
    found: list[int] = []
    warnings = Warnings()
    logging.getLogger("ckpt_component").addHandler(warnings)
    for step in steps:
        before = len(warnings.lines)
        save(manager, step, state_of(step))
        found += [step] * (len(warnings.lines) - before)
    logging.getLogger("ckpt_component").removeHandler(warnings)
    return found


def all_kinds(rank: int, world_size: int, folder: Path) -> None:
    """What differs is named once, whoever stores it; what is marked, equal or a rank's own is not."""
    torch.manual_seed(rank)
    alike = torch.Generator().manual_seed(1)
    large = torch.randn(300, 700, generator=alike)
    words = ["ab", "cd", "ef"]
    state: dict[str, Any] = {
        "rng": torch.get_rng_state(),
        "drifted": large.t() + rank * 1e-6,
        "seed": {"numpy": (numpy.arange(700) + rank, 1.0), "name": "ab"},
        "scalar": torch.tensor(float(rank)),
        "mine": PerRank(torch.get_rng_state()),
        "own" if rank else "other": torch.ones(3) * rank,
        "weights": [torch.randn(20, 20, generator=alike) for _ in range(30)],
        "large": large,
        "transposed": large.t() if rank else large.t().contiguous().t().t(),
        "complex": torch.randn(5, dtype=torch.complex64, generator=alike).conj(),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "float8": torch.arange(9.0).to(torch.float8_e4m3fn),
        "set": set(words if rank else reversed(words)),
        "order": ({"a": 1, "b": {"c", "d"}}, {"b": 2, "a": 1} if rank else {"a": 1, "b": 2}),
        "nan": float("nan"),
        "array": numpy.ones((50, 50))[:, ::2],
        "numbers": list(range(100_000)),
    }
    with manager_in(folder) as manager:
        assert warned(manager, [1, 2, 3, 4], lambda step: state) == ([1] if rank == 0 else [])


def later(rank: int, world_size: int, folder: Path) -> None:
    """Values that part later are noticed at the next look; also those that rank 0 does not have."""
    with manager_in(folder, "checkpoint.stager.arenas=1") as manager:

        def state_of(step: int) -> dict[str, Any]:
            parted = torch.full((10,), float(rank if step >= 3 else 0))
            return {"here": parted} if rank == 0 else {"here": parted, "there": {"x": parted.clone(), "y": rank - 1}}

        assert warned(manager, [1, 2, 3, 4, 5], state_of) == ([1, 4] if rank == 1 else [4] if rank == 0 else [])


def many(rank: int, world_size: int, folder: Path) -> None:
    """Of very many values some are looked at in each look, and all in time; ten are named."""
    state: dict[str, Any] = {f"t{number}": torch.full((), number) for number in range(9000)}
    state.update({f"u{number}": torch.full((), rank) for number in range(12)})
    with manager_in(folder) as manager:
        assert len(warned(manager, [1, 2, 3, 4, 5], lambda step: state)) == (1 if rank == 0 else 0)


def modules(rank: int, world_size: int, folder: Path) -> None:
    """The states of DDP and FSDP are alike on all ranks; the statistics of a module that FSDP ignores are not."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    data_parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(data_parallel.parameters())
    data_parallel(torch.full((4, 8), float(rank))).sum().backward()
    optimizer.step()
    with manager_in(folder / "ddp") as manager:
        state = {"model": data_parallel.state_dict(), "optimizer": optimizer.state_dict()}
        assert not warned(manager, [1, 2], lambda step: state)
    dist.barrier()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)]
    sharded = torch.nn.Sequential(*layers)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world_size,)), ignored_params=set(layers[1].parameters()))
    optimizer = torch.optim.AdamW([*layers[0].parameters(), *layers[2].parameters()])
    sharded(torch.randn(4, 8) * (rank + 1) + rank).sum().backward()
    optimizer.step()
    with manager_in(folder / "fsdp") as manager:
        state = {"model": sharded.state_dict(), "optimizer": optimizer.state_dict()}
        assert warned(manager, [1, 2], lambda step: state) == ([1] if rank == 0 else [])
