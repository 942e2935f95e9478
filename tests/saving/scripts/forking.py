"""What test_fork runs: children of os.fork end in the ways that Python programs end, beside a run that saves."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

import torch

from ckpt_component import CheckpointManager, build_manager

STATE: dict[str, Any] = {"weight": torch.ones(100)}


def fork_and(manager: CheckpointManager, way: str) -> None:
    """Fork; the child ends in one of the ways, and the parent waits for it."""
    began, pid = time.monotonic(), os.fork()
    if pid == 0:
        if way == "returns":
            return  # leaves the with block, and comes to the end of the script
        if way == "fails":
            raise ZeroDivisionError
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(f"{way}: {code} {'late' if time.monotonic() - began > 30 else 'soon'}", flush=True)


def train(preset: str, folder: str) -> None:
    home = os.getpid()
    with build_manager(preset, dir=folder) as manager:
        manager.restore(STATE)
        for step, way in enumerate(("exits", "fails", "returns"), 1):
            manager.maybe_save(step, STATE)
            manager.save(step, STATE)  # the child is forked in the middle of it
            fork_and(manager, way)
            if os.getpid() != home:
                break
    if os.getpid() == home:
        print([report.outcome for report in manager.reports], manager.steps(), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    train(*sys.argv[1:])
