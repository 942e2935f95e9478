"""What the ranks of test_replicas run: replicas of which a rank's bytes are changed behind torch's back."""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckpt_component import CheckpointManager, RanksError, ReplicasDifferError, build_manager


def manager_in(folder: Path, *overrides: str) -> CheckpointManager:
    quick = ["checkpoint.durability=process_crash", "checkpoint.save.at_end=false", "checkpoint.keep.last=1"]
    return build_manager("async_persistent", [*quick, "checkpoint.check_replicas=all", *overrides], dir=folder)


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What is warned of; files that are not shared are not of interest."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.addFilter(lambda record: "did not change but" not in record.getMessage())
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt_component").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("ckpt_component").removeHandler(handler)


def bits_of(tensor: torch.Tensor) -> Any:
    return (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())


def flip_one(data: Any) -> None:
    data[len(data) // 3] ^= 4


def flip_many(data: Any) -> None:
    for place in range(len(data) // 2):
        data[place] ^= 0xFF


def flip_stride(data: Any) -> None:
    for place in range(5, len(data), 1024):
        data[place] ^= 128


def write_nan(data: Any) -> None:
    data[8:12] = struct.pack("f", float("nan"))


def damaged(rank: int, world_size: int, folder: Path) -> None:
    """Each pattern, in a tensor of its own, that is frozen or changes from save to save."""
    patterns: list[Callable[[Any], None]] = [flip_one, flip_many, flip_stride, write_nan]
    random = torch.Generator().manual_seed(0)
    keys = [f"{pattern.__name__}_{kind}" for pattern in patterns for kind in ("frozen", "trained")]
    state = {key: torch.randn(100, 1000, generator=random) for key in keys}
    with manager_in(folder) as manager, warnings() as lines:
        expected, step = list[str](), 0

        def save() -> None:
            nonlocal step
            step += 1
            for key in keys:
                if key.endswith("trained"):
                    state[key] += 1
            assert manager.save(step, state)
            manager.wait()

        save()
        for number, key in enumerate(keys):
            if number == 3:
                state["new"] = torch.zeros(3)  # a new plan; what is known of the others remains
            save()
            assert len(lines) == len(expected), lines
            bad = number % world_size
            if rank == bad:
                version = state[key]._version
                patterns[number // 2](bits_of(state[key]))
                assert state[key]._version == version
            save()
            others = ", ".join(str(other) for other in range(world_size) if other != bad)
            text = f"rank {bad} differs from ranks {others}, which agree"
            if world_size == 2:
                text = f"the value of rank {bad} has changed since they agreed, that of rank {others} has not"
                if key.endswith("trained"):
                    text = "rank 0 and rank 1 differ; which of them is right is unknown"
            expected += [f"'{key}' ({text})"] if rank == 0 else []
            assert len(lines) == len(expected), (key, lines)
            assert not expected or expected[-1] in lines[-1], (lines[-1], expected[-1])


def refused(rank: int, world_size: int, folder: Path) -> None:
    """A save of different replicas fails, and the save after the repair does not; `on_error` applies."""
    fails = "checkpoint.on_different_replicas=error"
    weights = torch.arange(1000.0)
    data = bits_of(weights)

    def refuse(manager: CheckpointManager, step: int, state: dict[str, Any]) -> None:
        assert manager.save(step, state)
        with pytest.raises(ReplicasDifferError) as error:
            manager.wait()
        print(f"refused: {error.value}", flush=True)

    def accept(manager: CheckpointManager, step: int, state: dict[str, Any]) -> None:
        assert manager.save(step, state)
        manager.wait()

    equal, different = {"model": {"w": weights}, "seed": 1}, {"model": {"w": weights}, "seed": rank}
    with warnings() as lines:
        with manager_in(folder / "later", fails) as manager:
            accept(manager, 1, equal)
            data[77] ^= rank
            refuse(manager, 2, equal)
            data[77] ^= rank
            accept(manager, 3, equal)
        sampled = "checkpoint.check_replicas=sample"
        with manager_in(folder / "first", fails, sampled, "checkpoint.on_error=retry") as manager:
            manager.prewarm(different)  # its plan is not new at the first save, which compares all the same
            refuse(manager, 1, different)
        with manager_in(folder / "off", "checkpoint.check_replicas=off") as manager:
            accept(manager, 1, different)
        assert lines == []
        with manager_in(folder / "unknown", fails, "checkpoint.overlap=error") as manager:
            # Its `repr` raises an error, and what cannot be compared is not taken for equal.
            assert manager.save(1, {"large": 10**5000})
            with pytest.raises(RanksError, match="Ranks 0, 1 failed"):
                manager.wait()
            accept(manager, 2, equal)  # the memory is free again
        with manager_in(folder / "tolerated", fails, "checkpoint.on_error=warn") as manager:
            accept(manager, 1, different)
        assert len(lines) == 1 and "training continues" in lines[0], lines
    if rank == 0:
        names = {
            each.name: sorted(step.name for step in each.glob("iter_*")) for each in folder.iterdir() if each.is_dir()
        }
        assert names == {
            "later": ["iter_0000003"],
            "first": [],
            "off": ["iter_0000001"],
            "unknown": ["iter_0000002"],
            "tolerated": [],
        }, names


def trained(rank: int, world_size: int, folder: Path) -> None:
    """Models that are trained in parallel, saved after every step."""
    saves = int(os.environ["SAVES"])

    def layers() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))

    mesh = init_device_mesh("cpu", (world_size,))
    split = parallelize_module(layers(), mesh, {"1": ColwiseParallel(), "2": RowwiseParallel()})
    models = {"ddp": DistributedDataParallel(layers()), "fsdp": fully_shard(layers(), mesh=mesh), "tp": split}
    for name, model in models.items():
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        with manager_in(folder / name, "checkpoint.on_different_replicas=error") as manager, warnings() as lines:

            def save(step: int, model: Any = model, optimizer: Any = optimizer, manager: Any = manager) -> None:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                assert manager.save(step, state)

            for step in range(1, saves + 1):
                torch.manual_seed(step if name == "tp" else step * world_size + rank)
                model(torch.randn(4, 16)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                save(step)
            manager.wait()
            assert lines == [], lines
            # The alarm works.
            bits_of(next(iter(optimizer.state.values()))["step"])[2] ^= rank
            save(saves + 1)
            with pytest.raises(ReplicasDifferError, match="optimizer"):
                manager.wait()
