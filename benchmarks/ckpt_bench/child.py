"""Measure in a fresh process with a deadline, and end all processes that it started."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

import ckpt_component

from .task import ERROR

#: Not -m: our folders must be last on the path, so that the peers' packages take precedence over packages next to ours.
BOOT = (
    "import sys; sys.path += sys.argv.pop(1).split(':'); from ckpt_bench.task import main; sys.exit(main(sys.argv[1:]))"
)
#: Interval of listing processes, which takes milliseconds and would disturb the measurement if done more often.
_LOOK_S = 2.0
_GRACE_S = 2.0

Run = dict[str, Any]


def measure_in_child(
    call: str,
    arguments: Mapping[str, Any],
    base: str,
    log: Path,
    timeout: float,
    limit: str = "row_timeout",
    *,
    command: Sequence[str] = (),
) -> Run:
    """Call a function of this package in a fresh process, with a `folder` to save to that is removed afterwards.

    Args:
        call: the function as in `growth.item_costs:measure_items`
        arguments: its other arguments, values of JSON's types
        base: folder on the target, in which the folder is made
        log: a file for what the process prints; it is left after an error
        timeout: time limit in seconds
        limit: the key that sets it
        command: the interpreter and the code that calls the function, if others than these

    Returns:
        What the function yielded, and under `ERROR` why that is not all: its own error, or the last line of its log.
    """
    place = tempfile.mkdtemp(prefix="ckpt-bench-", dir=base)
    try:
        data, result = os.path.join(place, "data"), os.path.join(place, "result.json")
        os.mkdir(data)
        task = json.dumps({"call": call, "arguments": {**arguments, "folder": data}, "result": result})
        interpreter, boot = command or (sys.executable, BOOT)
        # The folders that this package and `ckpt_component` are imported from.
        roots = ":".join(str(Path(file).resolve().parents[1]) for file in (__file__, str(ckpt_component.__file__)))
        with open(log, "wb") as output:
            code = run_process([interpreter, "-c", boot, roots, task], output, timeout)
        run = _read_result(result, code, log, f"{timeout:.3g} s ({limit})")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if ERROR not in run:
        log.unlink()
    return run


def _read_result(path: str, code: int | None, log: Path, allowed: str) -> Run:
    run: Run = {}
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
        run = json.load(file)
    if code is None:
        return {**run, ERROR: f"killed: not done after {allowed}"}
    if ERROR in run or (run and code == 0):
        return run
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return {**run, ERROR: f"ended with code {code}: {lines[-1] if lines else 'no message'}"}


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
