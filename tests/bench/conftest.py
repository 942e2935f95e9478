from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ckpt_component

#: A state of 20 tensors, one repeat, and a loop of milliseconds.
TINY = ("state=tiny", "repeats=1", "saves=1", "pairs=1", "step_seconds=0.001", "tail_seconds=0")


@pytest.fixture
def tiny() -> tuple[str, ...]:
    """The overrides of a tiny run."""
    return TINY


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python -m ckpt_bench` for the tiny state, with no peers, in the folder tmp_path/run."""
    folder = tmp_path / "run"
    folder.mkdir()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        first = [word for word in arguments if "=" not in word]
        rest = [word for word in arguments if word not in first]
        command = ["-m", "ckpt_bench", *first, *TINY, f"peers_dir={tmp_path / 'peers'}", *rest]
        return subprocess.run(
            [sys.executable, *command, "hydra.run.dir=out"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(ckpt_component.__file__).parents[1])},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run
