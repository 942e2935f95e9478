"""Start and end the processes that work beside a run: exports and uploads."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from ..options import IoPriority
from .priority import lower_priority

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_NICE = 15


def start_in_background(code: str, *arguments: str, outlives_run: bool = False) -> subprocess.Popen[bytes]:
    """Start a process of low priority, with pipes as stdin and stdout. The caller ends it, with `tell_the_end`.

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


def send_line(process: subprocess.Popen[bytes], line: bytes = b"") -> None:
    """Write a line to a process's stdin, unless that is closed. Does not wait, if its stdin does not block.

    A line that does not fit is dropped: the process has died, or it is stopped and has thousands of lines to read.
    """
    if process.stdin is not None and not process.stdin.closed:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(process.stdin.fileno(), line + b"\n")


def tell_the_end(process: subprocess.Popen[bytes]) -> None:
    """Tell a process that its work is over: write a line to its stdin, and close it. Safe to call twice.

    Closing is not enough: a forked child of this process, such as a worker of a DataLoader, has the pipe open too.
    """
    send_line(process, b"end")
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
