"""Start the processes that work beside a run: exports and uploads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..options import IoPriority
from .priority import lower_priority

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_NICE = 15


def start_in_background(code: str, *arguments: str, outlives_run: bool = False) -> subprocess.Popen[bytes]:
    """Start a process of low priority, with pipes as stdin and stdout. The caller ends it, by closing its stdin.

    Args:
        code: Python code. Its first argument is the folder of this package.
        arguments: further arguments.
        outlives_run: its stdout is its stderr too, so that a log to which the run is piped ends with the run.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code, _PACKAGE_ROOT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if outlives_run else None,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # signals to the trainer's group are not meant for it
    )
    lower_priority(process.pid, _NICE, IoPriority.low)
    return process
