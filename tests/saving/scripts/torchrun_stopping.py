"""What torchrun starts in test_torchrun: trains until a signal, with a last save of about a second."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ckpt_component import build_manager

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
state = {"weight": torch.ones(1000)}
settings = [
    "checkpoint.save.every_steps=null",
    "checkpoint.save.at_end=false",
    "checkpoint.writer.max_bytes_per_second=300000",
]
with build_manager("async_persistent", settings, dir=folder / "run") as manager:
    manager.stop_on_signal()
    manager.restore(state)
    for step in range(1, 100_000):
        time.sleep(0.05)
        if step == 5:
            state["large"] = torch.ones(200_000)  # written by both ranks
            (folder / f"pid-{rank}").write_text(str(os.getpid()))
        manager.maybe_save(step, state)
        if manager.should_stop():
            break
(folder / f"stopped-{rank}").write_text(str(step))
manager.exit_if_stopped()
