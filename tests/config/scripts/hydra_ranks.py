"""Ranks of one job of a multirun, whose Hydra named the output folder by each rank's own clock."""

from __future__ import annotations

from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from ckpt_component import build_manager


def in_job(folder: str | Path, number: int) -> None:
    """Have this process be a job of the multirun in `folder`/multirun."""
    settings = {
        "mode": RunMode.MULTIRUN,
        "runtime": {"output_dir": str(Path(folder) / "multirun" / str(number)), "cwd": str(folder)},
        "sweep": {"dir": "multirun"},
        "overrides": {"task": [f"number={number}"]},
    }
    HydraConfig.instance().cfg = OmegaConf.create({"hydra": settings})  # type: ignore[assignment]


def save_in_own_output(rank: int, world_size: int, folder: Path) -> None:
    in_job(folder, rank)
    with build_manager("sync") as manager:
        manager.save(1, {"weight": torch.zeros(2)})
        print(manager.path_of(1))
