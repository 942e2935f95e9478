"""What the processes of test_run_kills and test_sharded_runs do: a run that publishes, and a receiver that follows it."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

from ckpt_component import build_manager
from ckpt_component.publishing import follow

ROWS = 1000


def weights_of(step: int) -> dict[str, torch.Tensor]:
    """The weights of a step; a few values differ from those of the step before."""
    drawn = torch.Generator().manual_seed(0)
    weights = {f"layer{number}": torch.randn(ROWS, 50, generator=drawn).bfloat16() for number in range(4)}
    for number, weight in enumerate(weights.values()):
        weight[(7 * step + number) % ROWS] = step % 128
    weights["steps"] = torch.tensor(step)
    return weights


def train(rank: int, world_size: int, folder: Path) -> None:
    """Resume and train, until the file `stop` is there; `last` says which step is the last one."""
    overrides = ["/recovery=host", ".recovery.every_steps=1", ".recovery.lease=20", ".save.every_steps=5"]
    overrides += [".durability=process_crash", f".publish.to={folder / 'weights'}"]
    overrides += [".publish.keep=4", ".publish.whole_every=6"]
    with build_manager("async_persistent", [f"checkpoint{each}" for each in overrides], dir=folder / "run") as manager:
        state = {"model": weights_of(0)}
        step = manager.restore(state) or 0
        assert all(value.equal(weights_of(step)[name]) for name, value in state["model"].items())
        is_over = False
        while not is_over:
            is_over = (folder / "stop").exists()  # after another step: what is restored is not published again
            step += 1
            for name, value in weights_of(step).items():
                state["model"][name].copy_(value)
            manager.maybe_save(step, state)
            time.sleep(0.05)
        (folder / "last").write_text(str(step))


def receive(rank: int, world_size: int, folder: Path) -> None:
    """Follow the run to its last step; each version has the weights of its step, bit for bit."""
    for weights in follow(folder / "weights", folder / "local", poll_seconds=0.05, timeout=90):
        assert weights.step is not None
        expected, there = weights_of(weights.step), dict(weights.tensors())
        assert there.keys() == expected.keys()
        assert all(value.equal(expected[name]) for name, value in there.items()), f"version {weights.version}"
        there.clear()
        with (folder / "received").open("a") as file:
            file.write(f"{weights.version}\n")
        if (folder / "last").exists() and weights.step == int((folder / "last").read_text()):
            return


def sharded(rank: int, world_size: int, folder: Path) -> None:
    """Train a model of FSDP2 for two steps; rank 0 stores the weights of the last one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 7), torch.nn.Linear(7, 5))
    fully_shard(model)
    publish = [f"checkpoint.publish.to={folder / 'weights'}", "checkpoint.save.every_steps=1"]
    with build_manager("async_persistent", publish, dir=folder / "run") as manager:
        for step in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            manager.maybe_save(step, {"model": model})
            manager.wait()
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(full, folder / "expected.pt")
