"""Train with Accelerate: `train_accelerate.py FOLDER [kill=trainer|all]`; the second epoch's save is the one to kill in."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from ckpt_component.integrations.accelerate import save_in_background

SLOWLY = ["checkpoint.writer.max_bytes_per_second=2MB", "checkpoint.writer.block_bytes=64KiB"]


class Counter:
    """A registered object of the user's."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def train(
    folder: Path,
    overrides: list[str] | None,
    *,
    epochs: int = 3,
    resume: bool = False,
    kill: str = "",
    limit: int | None = None,
) -> tuple[list[float], torch.Tensor]:
    """Losses of all epochs and the final weight; `overrides` None: Accelerate alone."""
    torch.manual_seed(1)
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Dropout(0.2), torch.nn.Linear(300, 300))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    rows: Any = torch.randn(24, 300, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if overrides is not None:
        save_in_background(accelerator, "async_persistent", overrides)
    start = 0
    if resume:
        accelerator.load_state()
        start = len(counter.losses) // 3
        project.iteration = start
    for epoch in range(start, epochs):
        for batch in loader:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.losses.append(loss.item())
        accelerator.save_state()
        if kill and epoch == 1:
            end(folder, kill)
    accelerator.end_training()
    return counter.losses, model[2].weight.detach().clone()


def end(folder: Path, whom: str) -> None:
    """Kill this process while a checkpoint is being written."""
    deadline = time.monotonic() + 60
    while not list((folder / "checkpoints").glob(".ckpt-tmp.checkpoint_1.*/*.*")):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    print("in the save", flush=True)
    for child in psutil.Process().children() if whom == "all" else ():
        child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    train(Path(sys.argv[1]), SLOWLY, kill=sys.argv[2].removeprefix("kill="))
