"""What a script has begun to save is saved, although it ends without closing anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_component import build_checkpointer

SCRIPT = Path(__file__).parent / "scripts" / "unclosed.py"


@pytest.mark.parametrize("interrupts", [0, 2])
def test_a_save_in_flight_is_committed_when_the_script_ends(interrupts: int, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(interrupts)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0 and done.stdout.count("interrupted\n") == min(interrupts, 1), done.stdout
    assert os.listdir(tmp_path) == ["one"]
    with build_checkpointer("sync") as checkpointer:
        assert checkpointer.verify(tmp_path / "one")
