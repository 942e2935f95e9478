"""The training script that is killed and started again, as one rank of a job: `python -m ckpt_bench.recovery.trainer`.

It marks when each phase of its start has ended, and each step; see `chain.MARKS`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from importlib import import_module
from typing import Any

from .marks import Marks, now

_BEGAN = now()


def main(arguments: list[str]) -> None:
    """Train.

    Args:
        arguments: one JSON text with `state` (its name), `step_seconds`, `resume`, `is_whole`, `overrides` and
            `on_meta` (see `RestartRow`), `folder` (of the run), `marks` (a folder), `every_steps`, and `steps`, after
            which it ends; None: it continues until it is killed
    """
    task: dict[str, Any] = json.loads(arguments[0])
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    marks = Marks(task["marks"], rank)
    marks.add("began", os.getpid(), at=_BEGAN)
    warnings.filterwarnings("ignore")

    import torch
    import torch.distributed as dist

    from .trained_model import TrainedModel

    module, _, name = task["resume"].partition(":")
    kind = getattr(import_module(f".{module}", __package__), name)
    marks.add("imported")
    if ranks > 1:
        dist.init_process_group("gloo")
    marks.add("grouped")
    model = TrainedModel(task["state"], task["step_seconds"], on_meta=task["on_meta"])
    resume = kind(model, task["folder"], task["every_steps"], is_whole=task["is_whole"], overrides=task["overrides"])
    marks.add("built", model.nbytes)
    found = resume.restore()
    if task["on_meta"] and found.step is None:
        model.initialise()
    marks.add("restored", found._asdict())
    together = torch.zeros(1, dtype=torch.float32, device="cpu")
    first = (found.step or 0) + 1
    step = first
    while task["steps"] is None or step < first + task["steps"]:
        if ranks > 1:
            dist.all_reduce(together)
        model.step()
        marks.add("step", step)
        if step == first:
            marks.add("first_step", step)
        resume.step_ended(step)
        marks.add("kept", step)
        step += 1
    resume.close()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
