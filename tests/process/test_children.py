"""Processes of this package: what reaches them, and what they do when their parent has gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import eventually, is_gone, pid_in

import ckpt_component
from ckpt_component.core.processes.framing import Frame
from ckpt_component.core.processes.serve import SIGNALS_OF_THE_TRAINER
from ckpt_component.core.processes.start import Child

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
HERE = Path(__file__).parent
POLICIES = pytest.mark.parametrize(("policy", "code"), [("exit", 1), ("finish", 0)])
ROOT = "host://runs/one@1f2e3d4c-0a0b0c0d"
ENDS = {"exit": "tidied up", "finish": "finished"}
Make = Callable[[str], Child]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A process of `child_program` that is at work; at its end it writes to `out`."""
    made: list[Child] = []

    def make(policy: str) -> Child:
        job = {"path": str(tmp_path / "out")}
        child = Child("child_program", job, environment={"ON_ORPHAN": policy, "PYTHONPATH": str(HERE)})
        made.append(child)
        assert answer(child) == {"pid": child.pid, "job": job}
        return child

    yield make
    for child in made:
        child.kill()


def soon() -> float:
    return time.monotonic() + 20


def answer(child: Child) -> object:
    frame: Frame | None = child.receive(soon())
    return None if frame is None else frame[0]


@POLICIES
def test_hanging_up_reaches_it_past_a_fork_that_has_the_connection(
    policy: str, code: int, make: Make, tmp_path: Path
) -> None:
    child = make(policy)
    reading, writing = os.pipe()
    fork = os.fork()
    if fork == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        child.hang_up()
        assert child.receive(soon()) is None and child.wait(20) == code
        assert (tmp_path / "out").read_text() == ENDS[policy]
        child.hang_up()
        assert child.end(0) == code
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(fork, 0)


@pytest.mark.parametrize(
    ("program", "environment", "code"),
    [
        ("child_program", {"ON_ORPHAN": "exit"}, 1),
        ("child_program", {"ON_ORPHAN": "finish"}, 0),
        ("ckpt_component.core.writing.worker", {}, 0),
        ("ckpt_component.hosts.keep", {}, 0),
        ("ckpt_component.hosts.keep", {"CKPT_RUNTIME_DIR": "/dev/null"}, 0),
    ],
)
def test_a_parent_that_dies_in_the_handshake_leaves_no_traceback(
    program: str, environment: dict[str, str], code: int, tmp_path: Path
) -> None:
    """It has sent the job, and does not read what the process sends then."""
    output: list[str] = []
    client = {"folder": str(tmp_path), "root": ROOT, "rank": 0, "world_size": 1, "lease": 1.0}
    job = client if program.endswith("keep") else {"path": str(tmp_path / "out")}
    common = {"CKPT_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": str(HERE)}
    child = Child(program, job, environment={**common, **environment}, log=output.append)
    child.hang_up(listens=False)
    try:
        assert child.wait(20) == code
        assert output == []
    finally:
        child.kill()


@pytest.mark.parametrize("policy", ENDS)
def test_it_notices_that_its_parent_was_killed_although_a_fork_of_that_lives(policy: str, tmp_path: Path) -> None:
    started, gate, out = tmp_path / "started", tmp_path / "gate", tmp_path / "out"
    script = f"""
import os, sys, time
sys.path[:0] = {sys.path!r}
import worker_calls as calls
from ckpt_component.core.processes.start import Child
environment = {{"ON_ORPHAN": {policy!r}, "PYTHONPATH": {str(HERE)!r}}}
child = Child("child_program", {{"path": {str(out)!r}}}, environment=environment)
child.receive()
if os.fork() == 0:
    calls.wait_for({str(gate)!r})
    os._exit(0)
calls.start_and_wait({str(started)!r}, {str(gate)!r})
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    pid_in(started)
    parent.kill()
    parent.wait()
    try:
        eventually(out.exists)
        eventually(lambda: out.read_text() == ENDS[policy])
    finally:
        gate.touch()


def test_frames_cross_with_bytes_and_files(make: Make) -> None:
    child, data = make("finish"), os.urandom(1 << 20)
    with open(__file__) as stream:
        child.send({"kind": "x"}, soon(), [data, memoryview(data)[:5]], [stream.fileno()])
    assert answer(child) == {"got": {"kind": "x"}, "bytes": len(data) + 5, "files": 1}


def test_signals_of_the_trainer_do_not_end_it(make: Make) -> None:
    child = make("finish")
    for number in SIGNALS_OF_THE_TRAINER:
        os.kill(child.pid, number)
    child.send({}, soon())
    assert answer(child) == {"got": {}, "bytes": 0, "files": 0}


def test_one_that_does_not_react_is_given_up_at_the_deadline_and_killed(make: Make) -> None:
    child = make("finish")
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        child.receive(time.monotonic() + 0.1)
    with pytest.raises(TimeoutError):
        child.send({}, time.monotonic() + 0.1, [bytes(1 << 24)])
    assert child.end(0.1) == -signal.SIGKILL
    assert not child.alive and is_gone(child.pid)
    assert child.receive(soon()) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        child.send({}, soon())


def test_what_it_prints_is_handed_on_line_by_line() -> None:
    lines: list[str] = []
    child = Child("no_such_module", {}, log=lines.append)
    assert child.receive(soon()) is None and child.end(20) == 1
    assert lines[-1] == "ModuleNotFoundError: No module named 'no_such_module'"


def test_processes_start_in_one_place() -> None:
    package = Path(ckpt_component.__file__).parent
    found = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if "Popen(" in path.read_text()}
    assert found == {"core/outside.py"}
