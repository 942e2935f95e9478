"""What the ranks of test_stop_signals run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import RanksError, build_manager

ONLY_WHEN_STOPPED = ["checkpoint.save.every_steps=null", "checkpoint.save.at_end=false"]


def stopped_at(preset: str, root: Path, rank: int, pause: float) -> tuple[int, Any]:
    """Train until all ranks stop, with a signal to rank 1 alone at step 3; the step, and the manager."""
    state = {"weight": torch.ones(3)}
    with build_manager(preset, ONLY_WHEN_STOPPED, dir=root) as manager:
        manager.stop_on_signal()
        for step in range(1, 100_000):
            time.sleep(pause * (1 + rank))
            manager.maybe_save(step, state)
            if step == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if manager.should_stop():
                break
    assert manager.stopped_by is signal.SIGUSR1
    return step, manager


def one_gets_a_signal(rank: int, world_size: int, folder: Path) -> None:
    """All stop after the same step, which is saved; also when steps take next to no time."""
    for number, pause in enumerate((0.05, 0.0)):
        root = folder / str(number)
        began = time.monotonic()
        step, manager = stopped_at("async_persistent", root, rank, pause)
        assert time.monotonic() - began < 30
        assert [report.step for report in manager.reports] == [step]
        assert manager.steps() == [step]


def without_checkpoints(rank: int, world_size: int, folder: Path) -> None:
    """With checkpoint=off the ranks still stop after the same step."""
    step, _ = stopped_at("off", folder, rank, 0.01)
    (folder / f"stopped-{rank}").write_text(str(step))
    torch.distributed.barrier()
    assert {path.read_text() for path in folder.glob("stopped-*")} == {str(step)}


def one_does_not_ask(rank: int, world_size: int, folder: Path) -> None:
    """A rank that goes on without asking is named."""
    with build_manager("async_persistent", ONLY_WHEN_STOPPED, dir=folder / "run") as manager:
        manager.stop_on_signal()
        manager.maybe_save(1, {})
        if rank == 1:
            with pytest.raises(RanksError, match="should_stop must be called on every rank; rank 0 did not"):
                manager.should_stop()
        else:
            manager.maybe_save(2, {})
        torch.distributed.barrier()
