"""A stop signal is noted, all ranks stop after the same step, and that step is saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import ckpt_component
from ckpt_component import CheckpointError, CheckpointManager, build_manager
from ckpt_component.managing.stop_signals import STOPPING

SCRIPT = Path(__file__).parent / "scripts" / "stopping.py"
NOTHING_BY_ITSELF = ["checkpoint.save.every_steps=null", "checkpoint.save.at_end=false"]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with build_manager("sync", NOTHING_BY_ITSELF, dir=tmp_path) as manager:
        manager.stop_on_signals()
        yield manager


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_is_noted_and_the_step_is_saved(
    number: signal.Signals, manager: CheckpointManager, capfd: pytest.CaptureFixture[str]
) -> None:
    manager.maybe_save(1, {"weight": torch.ones(2)})
    assert not manager.should_stop() and manager.stopped_by is None
    os.kill(os.getpid(), number)
    assert manager.should_stop() and manager.stopped_by is number
    assert capfd.readouterr().err == f"{number.name}: stopping after this step\n"
    manager.__exit__(None, None, None)
    assert manager.steps() == [1]


def test_the_first_signal_counts(manager: CheckpointManager) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert manager.should_stop() and manager.stopped_by is signal.SIGTERM


def test_handlers_are_as_before_afterwards(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in STOPPING]
    for failure in (False, True):
        try:
            with build_manager("off") as manager:
                manager.stop_on_signals()
                manager.stop_on_signals()
                assert signal.getsignal(signal.SIGTERM) != before[0]
                if failure:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert [signal.getsignal(number) for number in STOPPING] == before


def test_it_must_be_asked_for() -> None:
    with build_manager("off") as manager, pytest.raises(CheckpointError, match=r"Call stop_on_signals\(\) before"):
        manager.should_stop()


def test_outside_the_main_thread_it_says_what_it_cannot_do(caplog: pytest.LogCaptureFixture) -> None:
    def use() -> None:
        with build_manager("off") as manager:
            manager.stop_on_signals()
            assert not manager.should_stop()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(10)
    assert "training runs outside the main thread, so a SIGTERM will end it without a save" in caplog.messages


@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM"])
def test_a_sigint_after_another_signal_ends_at_once(first: str) -> None:
    code = f"""
import os, signal
from ckpt_component import build_manager
with build_manager("off") as manager:
    manager.stop_on_signals()
    os.kill(os.getpid(), signal.{first})
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("not here")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(ckpt_component.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "still here\n"
    assert done.returncode == -signal.SIGINT


@pytest.mark.parametrize("function", ["one_gets_a_signal", "without_checkpoints", "one_does_not_ask"])
def test_on_two_ranks(function: str, tmp_path: Path) -> None:
    run_ranks(SCRIPT, function, 2, tmp_path)
