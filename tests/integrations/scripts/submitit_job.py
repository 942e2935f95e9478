"""What the jobs of test_submitit run."""

from __future__ import annotations

import time
from pathlib import Path

import submitit
import torch

from ckpt_component import build_manager


def train(folder: Path, steps: int, pause: float, ranks: int = 1) -> str:
    """Train a small model; the last loss as hexadecimal text. Every start and every step is a line of a file."""
    rank = 0
    if ranks > 1:
        rank = submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False).rank
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    only_when_stopped = ["checkpoint.save.every_steps=null", "checkpoint.save.at_end=false"]
    with build_manager("async_persistent", only_when_stopped, dir=folder / "checkpoints") as manager:
        manager.stop_on_signal()
        start = manager.restore(state) or 0
        with open(folder / f"steps-{rank}", "a", buffering=1) as lines:
            lines.write(f"start {start}\n")
            for step in range(start + 1, steps + 1):
                time.sleep(pause)
                inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
                loss = (model(inputs) - inputs).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                lines.write(f"{step}\n")
                manager.maybe_save(step, state)
                if manager.should_stop():
                    break
    manager.exit_if_stopped()
    return float(loss.item()).hex()
