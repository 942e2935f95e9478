"""What the ranks of test_going_back run: rank 0 decides, and all hear of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import CheckpointExistsError, CheckpointManager, RanksError, build_manager


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step)), "step": step}


def manager_in(root: Path, *overrides: str) -> CheckpointManager:
    usual = ["checkpoint.save.every_steps=1", "checkpoint.save.at_end=false", "checkpoint.keep.last=null"]
    return build_manager("async_persistent", [*usual, *overrides], dir=root)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def together(rank: int, world_size: int, folder: Path) -> None:
    """An older step: refused, rewound, loaded from elsewhere; from scratch; and a first save that meets later steps."""
    logger, said = logging.getLogger("ckpt_component"), _Lines()
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    root = folder / "run"
    with manager_in(root) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
    for overrides in (["checkpoint.resume=1"], ["checkpoint.resume=never"]):
        with manager_in(root, *overrides) as manager, pytest.raises(CheckpointExistsError, match=r"rewind=true"):
            manager.restore(state_of(0))
    with manager_in(root) as manager, pytest.raises(CheckpointExistsError, match="Step 2 is the first"):
        manager.save(2, state_of(2))
    said.lines.clear()
    with manager_in(folder / "new", f"checkpoint.resume={root}/iter_0000002") as manager:
        state = state_of(0)
        assert manager.restore(state) == 2 and state["weight"].eq(2).all()
        manager.save(3, state)
    assert sum(line.startswith("restored step 2 from") for line in said.lines) == (rank == 0)
    with manager_in(root, "checkpoint.resume=1", "checkpoint.rewind=true") as manager:
        assert manager.restore(state_of(0)) == 1
        assert manager.steps() == [1]
        manager.save(2, state_of(2))
    # A state that one rank cannot save is refused on all when they resume.
    bad = {**state_of(0), **({"bad": Path("somewhere")} if rank else {})}
    with manager_in(root) as manager, pytest.raises(RanksError, match="Rank 1 failed.*bad"):
        manager.restore(bad, strict=False)
