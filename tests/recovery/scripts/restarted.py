"""What torchrun starts in test_torchrun: trains, keeps a snapshot of each step, and one rank is killed in each start."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist
from recovery.scripts.training import Source, Training
from snapshots import MEMORY

from ckpt_component import build_manager

#: Of each start: which rank is killed, and after which step.
KILLS = {0: (1, 4), 1: (2, 7)}
STEPS = 10


def main(folder: Path) -> None:
    """One rank; writes what it does to a file."""
    dist.init_process_group("gloo")
    rank, start = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    training, source = Training(rank), Source()
    overrides = ["checkpoint.save.every_steps=1000", "checkpoint.save.at_end=false", *MEMORY]
    with (
        open(folder / f"start{start}-{rank}", "w") as told,
        build_manager("async_persistent", overrides, dir=folder / "run") as manager,
    ):
        manager.add_listener(source)
        restored = manager.restore(training.state)
        manager.wait()  # the listener has heard it
        print(json.dumps([restored, source.source]), file=told, flush=True)
        for step in range((restored or 0) + 1, STEPS + 1):
            print(json.dumps([step, training.step(step)]), file=told, flush=True)
            manager.maybe_save(step, training.state)
            manager.wait()
            if KILLS.get(start) == (rank, step):
                os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
