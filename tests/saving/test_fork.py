"""A fork copies a manager without its threads: the copy saves nothing, waits for nothing, and ends nothing of its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import CheckpointError, CheckpointManager, build_checkpointer, build_manager

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
SCRIPT = Path(__file__).parent / "scripts" / "forking.py"
PRESETS = pytest.mark.parametrize("preset", ["sync", "async_persistent", "async_zero_overhead"])


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step))}


def manager_in(root: Path, *overrides: str, preset: str = "async_persistent") -> CheckpointManager:
    return build_manager(preset, ["checkpoint.save.every_steps=1", *overrides], dir=root)


@pytest.fixture(params=["default", "handler"])
def end_by_sigterm(request: pytest.FixtureRequest) -> Iterator[int]:
    """The exit code of a process that gets a SIGTERM, for which there is a handler or not."""
    own = request.param == "handler"
    before = signal.signal(signal.SIGTERM, (lambda number, frame: os._exit(7)) if own else signal.SIG_DFL)
    yield 7 if own else -signal.SIGTERM
    signal.signal(signal.SIGTERM, before)


def in_child(told: Path, *calls: Callable[[], object]) -> list[str]:
    """Fork, make the calls in the child, and return what each raised, or `ok`."""
    pid = os.fork()
    if pid == 0:
        try:
            for call in calls:
                try:
                    call()
                    line = "ok"
                except CheckpointError as error:
                    line = str(error)
                with told.open("a") as stream:
                    stream.write(f"{line}\n")
        finally:
            os._exit(0)
    deadline = time.monotonic() + 60
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError("the child did not end")
        time.sleep(0.01)
    return told.read_text().splitlines()


@PRESETS
def test_a_forked_manager_refuses_and_closes_nothing(preset: str, tmp_path: Path) -> None:
    state, root = state_of(1), tmp_path / "run"
    with manager_in(root, preset=preset) as manager:
        manager.stop_on_signal(signal.SIGUSR1)
        assert manager.save(1, state)
        refused = (
            lambda: manager.save(2, state),
            lambda: manager.maybe_save(2, state),
            lambda: manager.restore(state),
            lambda: manager.begin_at(1),
            lambda: manager.prewarm(state),
            manager.wait,
            manager.stop_on_signal,
            manager.should_stop,
        )
        silent = (manager.exit_if_stopped, lambda: manager.__exit__(None, None, None), manager.close)
        told = in_child(tmp_path / "told", *refused, *silent)
        text = f"This manager belongs to process {os.getpid()}; build one after the fork (docs/failures.md#forks)."
        assert told == [text] * len(refused) + ["ok"] * len(silent)
        manager.wait()
        assert manager.save(2, state)
    assert manager.steps() == [1, 2]


@PRESETS
def test_a_forked_checkpointer_refuses_and_closes_nothing(preset: str, tmp_path: Path) -> None:
    state = state_of(1)
    with build_checkpointer(preset) as checkpointer:
        checkpointer.save(state, tmp_path / "one")
        told = in_child(
            tmp_path / "told",
            lambda: checkpointer.save(state, tmp_path / "two"),
            lambda: checkpointer.load(tmp_path / "one"),
            checkpointer.wait,
            lambda: checkpointer.prewarm(state),
            checkpointer.close,
        )
        text = f"This checkpointer belongs to process {os.getpid()}; build one after the fork (docs/failures.md#forks)."
        assert told == [text] * 4 + ["ok"]
        checkpointer.save(state, tmp_path / "two")
        checkpointer.wait()
        assert checkpointer.load(tmp_path / "two")["weight"].eq(1).all()


def test_a_child_that_builds_its_own_manager_saves(tmp_path: Path) -> None:
    def train() -> None:
        with manager_in(tmp_path / "child", preset="sync") as own:
            own.save(7, state_of(7))

    with manager_in(tmp_path / "parent", preset="sync") as manager:
        assert in_child(tmp_path / "told", train) == ["ok"]
        assert manager.save(1, state_of(1))
    assert (tmp_path / "child" / "iter_0000007").is_dir()


def test_a_signal_ends_a_child_and_not_the_loop_of_its_parent(tmp_path: Path, end_by_sigterm: int) -> None:
    with manager_in(tmp_path, preset="sync") as manager:
        manager.stop_on_signal()
        pid = os.fork()
        if pid == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == end_by_sigterm
        assert not manager.should_stop()


def test_the_end_of_uploads_reaches_them_past_a_child_that_has_their_pipe(tmp_path: Path) -> None:
    """Such as a worker of a DataLoader, which lives as long as training."""
    local = [f"checkpoint.local.dir={tmp_path / 'local'}", "checkpoint.upload.finish_seconds=100"]
    reading, writing = os.pipe()
    with manager_in(tmp_path / "far", *local) as manager:
        manager.restore(state_of(0))
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        try:
            manager.save(1, state_of(1))
            began = time.monotonic()
            manager.__exit__(None, None, None)
            assert time.monotonic() - began < 60
        finally:
            os.close(writing)
            os.close(reading)
            os.waitpid(pid, 0)
    assert (tmp_path / "far" / "iter_0000001").is_dir()


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize("preset", [pytest.param("sync", marks=pytest.mark.soak), "async_persistent"])
def test_children_that_end_as_programs_do_leave_the_run_alone(preset: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, preset, tmp_path / "run"], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == [
        "exits: 0 soon",
        "fails: 1 soon",
        "returns: 0 soon",
        "['committed', 'committed', 'committed'] [1, 2, 3]",
    ]
