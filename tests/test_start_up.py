"""What the start of a run costs: which parts of torch and of its dependencies a save and a restore import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks

SCRIPT = Path(__file__).parent / "scripts" / "start_up.py"
WITHOUT_HOSTS = SCRIPT.with_name("without_hosts.py")
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


def test_no_save_and_no_load_without_recovery_on_one_host_imports_what_is_for_others(tmp_path: Path) -> None:
    command = [sys.executable, str(WITHOUT_HOSTS), str(tmp_path)]
    env = {**os.environ, "CKPT_RUNTIME_DIR": str(tmp_path / "runtime")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.slow
def test_nor_do_several_ranks_on_one_host(tmp_path: Path) -> None:
    for output in run_ranks(WITHOUT_HOSTS, "on_a_rank", 2, tmp_path, whole=True):
        assert "imported []" in output
