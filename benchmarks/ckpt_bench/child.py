"""Run a measuring process with a deadline, and end all processes that it started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import psutil

import ckpt_component

#: Interval of listing processes, which takes milliseconds and would disturb the measurement if done more often.
_LOOK_S = 2.0
_GRACE_S = 2.0


def package_roots() -> str:
    """The folders that this package and `ckpt_component` are imported from, for the path of another interpreter."""
    return ":".join(str(Path(file).resolve().parents[1]) for file in (__file__, str(ckpt_component.__file__)))


def run_process(command: Sequence[str], output: IO[bytes], timeout: float) -> int | None:
    """Run a process and end all that it started, even if this call raises.

    Args:
        command: the command, run in its own session
        output: file for its output
        timeout: seconds after which it is killed

    Returns:
        The exit code, or None if the deadline passed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "ignore"},
    )
    started: set[psutil.Process] = set()
    deadline = time.monotonic() + timeout
    try:
        while True:
            # Recorded while the parent lives, because an orphan in its own session could not be found later.
            started |= _descendants(process.pid)
            try:
                return process.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= deadline:
                    return None
    finally:
        started |= _descendants(process.pid) | _session_of(process.pid)
        over = process.returncode is not None
        if not over:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the row is reported as hung in any case
                process.wait(_GRACE_S)
        # psutil identifies a process by id and start time, so no other process is killed. After a normal end, children
        # get a moment to exit by themselves.
        left = [child for child in started if child.is_running()]
        _, left = psutil.wait_procs(left, timeout=_GRACE_S if over else 0)
        for child in left:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=5)


def _descendants(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _session_of(leader: int) -> set[psutil.Process]:
    """The processes in the session of a leader, which may have ended; without the leader."""
    members = set()
    for process in psutil.process_iter():
        try:
            if process.pid != leader and os.getsid(process.pid) == leader:
                members.add(process)
        except OSError:  # it has just ended
            continue
    return members
