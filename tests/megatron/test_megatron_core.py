"""A real megatron-core saves with this package's names in place of its own, and loads what it saved; see `megatron_places`."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_places import PLACES, name_of
from ranks import run_ranks

SCRIPT = Path(__file__).with_name("megatron_save.py")


@functools.cache
def why_not(place: str) -> str | None:
    """None where megatron-core can be imported."""
    # In a process of its own, as the test runs it: what other tests have imported here may get in its way.
    code = "import ckpt_component.megatron as m; m.install(); import megatron.core.dist_checkpointing"
    command = [sys.executable, "-W", "ignore", "-c", code]
    env = {**os.environ, "PYTHONPATH": place}
    tried = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    if tried.returncode == 0:
        return None
    if "No module named 'megatron" in tried.stderr and not place:
        return "needs megatron-core (pip install --no-deps megatron-core==0.16.1)"
    raise AssertionError(tried.stderr)


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("place", PLACES, ids=name_of)
@pytest.mark.parametrize(
    ("function", "world_size"),
    [
        pytest.param("nvrx", 1, marks=pytest.mark.soak),
        ("nvrx", 2),
        pytest.param("mcore", 2, marks=pytest.mark.soak),
        ("installed_late", 1),
        pytest.param("synchronous", 2, marks=pytest.mark.soak),
        pytest.param("megatrons_writer", 2, marks=pytest.mark.soak),
    ],
)
def test_megatron_core_saves_and_loads(function: str, world_size: int, place: str, tmp_path: Path) -> None:
    reason = why_not(place)
    if reason is not None:
        pytest.skip(reason)
    run_ranks(SCRIPT, function, world_size, tmp_path, timeout=360, PYTHONPATH=place)
