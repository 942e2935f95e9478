"""A real megatron-core saves through `dist_checkpointing.save(..., async_sharded_save=True)` and loads it back."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks

SCRIPT = Path(__file__).with_name("megatron_save.py")


@functools.cache
def why_not() -> str | None:
    """None where megatron-core can be imported."""
    # In a process of its own, as the test runs it: what other tests have imported here may get in its way.
    command = [sys.executable, "-W", "ignore", "-c", "import megatron.core.dist_checkpointing"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if tried.returncode == 0:
        return None
    if "No module named 'megatron" in tried.stderr:
        return "needs megatron-core (pip install --no-deps megatron-core==0.16.1)"
    raise AssertionError(tried.stderr)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("function", ["ours", "megatrons_writer"])
def test_megatron_core_saves_and_loads(function: str, world_size: int, tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    run_ranks(SCRIPT, function, world_size, tmp_path, timeout=240)
