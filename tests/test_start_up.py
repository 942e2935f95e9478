"""What the start of a run costs: which parts of torch and of its dependencies a save and a restore import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "start_up.py"
#: They take as long as `import torch` does, and only a job with DTensors needs them.
SLOW = ("torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo", "sympy")


@pytest.mark.slow
def test_a_save_and_a_restore_without_dtensors_import_no_slow_part_of_torch(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout)
    assert "ckpt_component.factory.graph" in imported
    assert [name for name in imported if name in SLOW] == []
