"""Ranks that were restarted agree, though each host counts the restarts that it has seen itself."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from ranks import run_ranks

from ckpt_component import build_manager
from ckpt_component.core.coordination.rank_store import RankStore


def of_another_host(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 is on a host that took the place of another one, so torchrun there has restarted nothing yet."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(1 - rank)
    with build_manager("sync", ["checkpoint.timeouts.stage=20s"], dir=folder / "run") as manager:
        assert manager.restore({"weight": torch.ones(3)}) is None
        manager.save(1, {"weight": torch.ones(3)})
        assert manager.steps() == [1]


def test_a_host_that_took_the_place_of_another_counts_restarts_from_0(tmp_path: Path) -> None:
    run_ranks(Path(__file__), "of_another_host", 2, tmp_path)


def of_the_agent(rank: int, world_size: int, folder: Path) -> None:
    """The store is that of torchrun, and has the keys of the start before."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for start in range(2):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(start)
        store = RankStore.shared("test")
        assert store is not None and store.peek(f"rank{rank}") is None
        store.set(f"rank{rank}", b"")


def test_a_store_that_outlives_the_ranks_has_other_keys_for_each_start(tmp_path: Path) -> None:
    run_ranks(Path(__file__), "of_the_agent", 2, tmp_path)
