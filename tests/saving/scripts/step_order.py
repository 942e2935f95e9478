"""What the ranks of test_step_order run: each refuses an earlier step by itself, and they go on together."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import CheckpointManager, CheckpointStepError, build_manager


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step)), "step": step}


def manager_in(root: Path, *overrides: str) -> CheckpointManager:
    usual = ["checkpoint.save.every_steps=1", "checkpoint.save.at_end=false"]
    return build_manager("async_persistent", [*usual, *overrides], dir=root)


def refused(rank: int, world_size: int, folder: Path) -> None:
    """After a restore, after a save, and after a save that failed on one rank only."""
    with manager_in(folder) as manager:
        manager.save(10, state_of(10))
    bad = {**state_of(12), **({"bad": Path("somewhere")} if rank else {})}
    with manager_in(folder, "checkpoint.on_error=warn") as manager:
        assert manager.restore(state_of(0)) == 10
        with pytest.raises(CheckpointStepError, match="Step 9 is not after step 10, which this run restored"):
            manager.save(9, state_of(9))
        assert manager.save(11, state_of(11))
        with pytest.raises(CheckpointStepError, match="Step 10 is not after step 11, which this run saved last"):
            manager.maybe_save(10, state_of(10))
        manager.save(12, bad)
        with pytest.raises(CheckpointStepError, match="Step 11 is not after step 12, which this run saved last"):
            manager.save(11, state_of(11))
        assert manager.save(13, state_of(13))
        manager.wait()
        assert manager.steps() == [10, 11, 13]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def closing(rank: int, world_size: int, folder: Path) -> None:
    """Rank 0 alone says how the saves went."""
    logger, lines = logging.getLogger("ckpt_component"), _Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    with manager_in(folder) as manager:
        manager.save(1, state_of(1))
    said = [line for line in lines.lines if line.startswith("saved 1 checkpoint: ")]
    assert len(said) == (rank == 0), lines.lines
    assert rank or "bytes by rank 0, " in said[0]
