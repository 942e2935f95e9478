"""What the ranks of test_reuse run: frozen weights that all ranks have, and shards of others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_component import build_manager

SIZE = 1 << 20


def state_of(step: int, world_size: int) -> dict[str, Any]:
    """The state after a step."""
    mesh = init_device_mesh("cpu", (world_size,))
    shards = distribute_tensor(torch.arange(SIZE, dtype=torch.float32).reshape(1024, -1), mesh, [Shard(0)])
    return {
        "replicated": {f"layer{number}": torch.full((SIZE // 4,), float(number)) for number in range(4)},
        "sharded": shards,
        "adapter": torch.full((1000,), float(step)),
    }


def save_some(rank: int, world_size: int, folder: Path) -> None:
    """Save steps; rank 1 changes its shard without a version before the fifth."""
    state = state_of(0, world_size)
    with build_manager("async_persistent", [f"checkpoint.dir={folder}", "checkpoint.save.at_end=false"]) as manager:
        written = []
        for step in range(1, 8):
            state["adapter"].fill_(float(step))
            if step == 5 and rank == 1:
                state["sharded"].to_local().numpy()[-1, -1] += 1
            manager.save(step, state)
            manager.wait()
            written.append(manager.reports[-1].bytes)
    small = [each < 100_000 for each in written]
    # Each rank has half of the shards and half of the replicated weights.
    assert small[:4] == [False, False, True, True], written
    if rank == 1:  # the file with what changed, then the file without it; and after that only what changed
        assert not small[4] and not small[5] and written[6] < written[5] / 1.5, written
    else:
        assert all(small[4:]), written
    resume(rank, world_size, folder)


def resume(rank: int, world_size: int, folder: Path) -> None:
    """On any number of ranks."""
    state = state_of(-1, world_size)
    state["sharded"].to_local().zero_()
    with build_manager("async_persistent", [f"checkpoint.dir={folder}"]) as manager:
        assert manager.restore(state) == 7
    whole = state["sharded"].full_tensor()
    expected = torch.arange(SIZE, dtype=torch.float32).reshape(1024, -1)
    expected[1023, -1] += 1
    assert torch.equal(whole, expected)
    assert torch.equal(state["adapter"], torch.full((1000,), 7.0))
    for number in range(4):
        assert torch.equal(state["replicated"][f"layer{number}"], torch.full((SIZE // 4,), float(number)))


def train_by_fsdp(rank: int, world_size: int, folder: Path) -> None:
    """No version counter tells that a DTensor is trained; what is frozen is shared, and nothing else is expected to be."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    model[0].requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=True)
    lines = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt_component").addHandler(handler)
    logging.getLogger("ckpt_component").setLevel(logging.INFO)
    with build_manager("async_persistent", [f"checkpoint.dir={folder}"]) as manager:
        for step in range(1, 7):
            model(torch.randn(4, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save(step, {"model": model, "optimizer": optimizer})
            manager.wait()
        reused = [report.reused for report in manager.reports]
    assert reused[0] == 0 and all(each >= 512 * 512 * 4 // world_size for each in reused[2:]), reused
    # The optimizer has no state before the first step, so one plan may follow the first save.
    assert not [line for line in lines if "changed after it was the same" in line], lines
    assert sum(line.startswith("planned") for line in lines) <= 1, lines
