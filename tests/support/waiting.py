"""Bounded waits for tests."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def eventually(condition: Callable[[], object], seconds: float = 60, what: str = "") -> None:
    """Wait for a condition; on a busy machine a process of low priority takes a while to start."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what or f"not within {seconds} s"
        time.sleep(0.005)


def pid_in(path: Path) -> int:
    """The process id that a started process wrote as its first line."""
    eventually(lambda: path.exists() and path.read_text().endswith("\n"), what=f"nothing in {path}")
    return int(path.read_text().split()[0])


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def open_fds() -> int:
    gc.collect()  # what earlier tests left to it
    return len(os.listdir("/proc/self/fd"))
