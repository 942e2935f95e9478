from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import run_program

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

    def run(*arguments: str, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
        first = [word for word in arguments if "=" not in word]
        rest = [word for word in arguments if word not in first]
        command = ["-m", "ckpt_bench", *first, *TINY, f"peers_dir={tmp_path / 'peers'}", *rest]
        return run_program([*command, "hydra.run.dir=out"], folder, apart=True, timeout=timeout)

    return run
