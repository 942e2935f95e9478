from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ckpt_component
from ckpt_component.apps.training.signals import STOPPING, StopSignals


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_is_noted_and_nothing_ends(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as stop:
        assert stop.caught is None
        os.kill(os.getpid(), number)
        assert stop.caught is number
    assert capfd.readouterr().err == f"{number.name}: stopping after this step\n"


def test_the_first_signal_counts() -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.caught is signal.SIGTERM


def test_handlers_are_as_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in STOPPING]
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in STOPPING] == before


def test_outside_the_main_thread_it_says_what_it_cannot_do(caplog: pytest.LogCaptureFixture) -> None:
    def use() -> None:
        with StopSignals():
            pass

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(10)
    assert caplog.messages == ["training runs outside the main thread, so a SIGTERM will end it without a save"]


@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM"])
def test_a_sigint_after_another_signal_ends_at_once(first: str) -> None:
    code = f"""
import os, signal
from ckpt_component.apps.training.signals import StopSignals
with StopSignals():
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
