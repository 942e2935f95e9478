"""Optimizer state follows its parameter to DDP, FSDP2, other numbers of ranks, and other pipeline stages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ranks import run_ranks

from ckpt_component import build_checkpointer

SCRIPT = Path(__file__).parent / "scripts" / "worlds.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("worlds", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_saved_on_two_ranks_and_loaded_on_one_two_and_three(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "save", 2, tmp_path)
    for world_size in (1, 2, 3):
        run_ranks(SCRIPT, "resume", world_size, tmp_path)


def test_pipeline_stages_are_told_apart_and_come_together(tmp_path: Path) -> None:
    said = run_ranks(SCRIPT, "stages", 2, tmp_path)
    assert all("'optimizer' has other parameters on rank 1 than on rank 0" in text for text in said), said
    worlds = script()
    expected, plain = worlds.make("plain", worlds.LAYERS)
    worlds.train(expected, plain, 2)
    model, optimizer = worlds.make("plain", worlds.LAYERS)
    with build_checkpointer("sync", ["checkpoint.load.prove=on_read"]) as checkpointer:
        state = {"model": model, "optimizer": optimizer}
        checkpointer.load(tmp_path / "stages", state, strict=True, allow_unexpected=False)
    right = worlds.moments(expected, plain)
    for name, values in worlds.moments(model, optimizer).items():
        assert all(map(torch.equal, values, right[name])), name
