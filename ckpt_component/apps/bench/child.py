"""A process that measures: it has a deadline, and nothing that it started outlives it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from typing import IO

import psutil

#: How often the processes are looked up: a look takes milliseconds, which what is measured would feel.
_LOOK_S = 2.0
_GRACE_S = 2.0


def run_process(command: Sequence[str], output: IO[bytes], timeout: float) -> int | None:
    """Run a process and end all that it started, also when this call is left by an exception.

    Args:
        command: what to run; gets a session of its own.
        output: gets what it prints.
        timeout: seconds after which it is killed.

    Returns:
        The exit code, or None when the deadline was over.
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
            # Seen while their parent lives: an orphan in a session of its own could not be found any more.
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
        # psutil holds a process by its id and its start, so that none but those is ended. Those of a row that has ended
        # may be about to end too.
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
    """What is left of the session that a process began, which may have ended; without itself."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.pid != leader and os.getsid(process.pid) == leader:
                found.add(process)
        except OSError:  # it ended in between
            continue
    return found
