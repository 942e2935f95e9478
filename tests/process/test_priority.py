"""The priority of processes that have a session of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GROUP = Path("/proc/self/autogroup")
SCRIPT = """
import os, subprocess
import psutil
from ckpt_component.core.options import IoPriority
from ckpt_component.core.outside import OUTSIDE
os.setuid(65534)
processes = [
    subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=own) for own in (True, True, True, False)
]
for process in processes:
    OUTSIDE.lower_priority(process.pid, 15, IoPriority.low)
for process in processes:
    print(psutil.Process(process.pid).nice(), open(f"/proc/{process.pid}/autogroup").read().split()[-1])
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, which becomes another user")
@pytest.mark.skipif(not GROUP.exists(), reason="needs a kernel that groups tasks by session")
def test_each_session_is_lowered_although_the_kernel_limits_the_rate_and_the_own_is_not() -> None:
    # In a session of its own: the one of this test may have no group, as that of init.
    command = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert ended.stdout.splitlines() == ["15 15"] * 3 + ["15 0"], ended.stderr
