"""A real megatron-core saves with this package's names in place of its own, and loads what it saved.

Two releases: the one that is installed (0.16.1 is the last for Python 3.11), and those whose wheels were unpacked into
folders that `CKPT_TEST_MEGATRON` lists, separated by colons. 0.19.2 asks for Python 3.12, but runs on 3.11 too, with
triton, which torch for CUDA brings along:

    pip download --no-deps --python-version 3.12 --only-binary=:all: megatron-core==0.19.2 && unzip -d megatron-0.19 *.whl
    pip install --no-deps triton
    CKPT_TEST_MEGATRON=megatron-0.19 pytest -m slow tests/megatron
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks

SCRIPT = Path(__file__).with_name("megatron_save.py")
#: PYTHONPATH of each release; nothing for the one that is installed.
PLACES = ["", *filter(None, os.environ.get("CKPT_TEST_MEGATRON", "").split(os.pathsep))]


@functools.cache
def why_not(place: str) -> str | None:
    """None where megatron-core can be imported."""
    # In a process of its own, as the test runs it: what other tests have imported here may get in its way.
    code = "import ckpt_component.megatron as m; m.install(); import megatron.core.dist_checkpointing"
    command = [sys.executable, "-W", "ignore", "-c", code]
    env = {**os.environ, "PYTHONPATH": place}
    tried = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    if tried.returncode == 0:
        return None
    if "No module named 'megatron" in tried.stderr and not place:
        return "needs megatron-core (pip install --no-deps megatron-core==0.16.1)"
    raise AssertionError(tried.stderr)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: Path(place).name or "installed")
@pytest.mark.parametrize(
    ("function", "world_size"),
    [
        ("nvrx", 1),
        ("nvrx", 2),
        ("mcore", 2),
        ("installed_late", 1),
        ("synchronous", 2),
        ("megatrons_writer", 2),
    ],
)
def test_megatron_core_saves_and_loads(function: str, world_size: int, place: str, tmp_path: Path) -> None:
    reason = why_not(place)
    if reason is not None:
        pytest.skip(reason)
    run_ranks(SCRIPT, function, world_size, tmp_path, timeout=240, PYTHONPATH=place)
