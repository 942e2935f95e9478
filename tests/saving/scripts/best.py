"""What the ranks of test_best run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import eventually

from ckpt_component import CheckpointManager, RanksError, build_manager, stored_config, stored_metrics


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step)), "step": step}


def manager_in(root: Path, *overrides: str) -> CheckpointManager:
    usual = ["checkpoint.save.every_steps=1", "checkpoint.save.at_end=false", "checkpoint.keep.last=1"]
    return build_manager("async_persistent", [*usual, "checkpoint.keep.best.metric=loss", *overrides], dir=root)


def compared(rank: int, world_size: int, folder: Path) -> None:
    """Rank 0 alone has the loss, or another one; a metric that is none is refused on all ranks, whoever passes it."""
    root = folder / "run"
    with manager_in(root) as manager:
        for step, loss in enumerate([0.5, 0.1, 0.3], 1):
            manager.maybe_save(step, state_of(step), metrics={"loss": loss if rank == 0 else -step})
        manager.wait()
        manager.maybe_save(4, state_of(4), metrics={"loss": 0.7} if rank == 0 else None)
        with pytest.raises(RanksError, match=r"Rank 1 failed.*metrics\['loss'\] is 'low'"):
            manager.maybe_save(5, state_of(5), metrics={"loss": "low" if rank else 0.0})
        assert manager.maybe_save(6, state_of(6), metrics={"loss": 0.2} if rank == 0 else {})
        manager.wait()
    eventually(lambda: manager.steps() == [2, 6], 30)  # rank 0 deletes, and the other rank does not wait for that
    assert manager.best_steps() == [2, 6]
    state = state_of(0)
    with manager_in(root, "checkpoint.resume=best", "checkpoint.rewind=true") as manager:
        assert manager.restore(state) == 2 and state["weight"].eq(2).all()
        assert manager.steps() == [2]


def recorded(rank: int, world_size: int, folder: Path) -> None:
    """Rank 0's record and metrics are in the checkpoint, once."""
    with build_manager("async_persistent", [f"checkpoint.keep.last={5 + rank}"], dir=folder / "run") as manager:
        manager.save(1, state_of(1), metrics={"loss": 0.5 + rank})
        manager.wait()
        path = manager.path_of(1)
    assert stored_config(path).config["checkpoint"]["keep"]["last"] == 5
    assert stored_metrics(path) == {"loss": 0.5}
