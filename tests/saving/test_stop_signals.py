"""A stop signal is noted, all ranks stop after the same step, and that step is saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from outsides import SetTime
from ranks import run_ranks

import ckpt_component
from ckpt_component import CheckpointConfigError, CheckpointError, CheckpointManager, CheckpointTypeError, build_manager
from ckpt_component.core.coordination import LocalCoordinator
from ckpt_component.core.outside import Outside
from ckpt_component.core.processes.running import OwnerProcess
from ckpt_component.managing.stop_signals import STOPPING, StoppableLoop, StopSignals

SCRIPT = Path(__file__).parent / "scripts" / "stopping.py"
NOTHING_BY_ITSELF = ["checkpoint.save.every_steps=null", "checkpoint.save.at_end=false"]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with build_manager("sync", NOTHING_BY_ITSELF, dir=tmp_path) as manager:
        manager.stop_on_signal()
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


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGUSR1), (signal.SIGUSR1, signal.SIGTERM)])
def test_of_two_signals_the_warning_counts(
    numbers: tuple[signal.Signals, ...], manager: CheckpointManager, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)
    assert manager.should_stop() and manager.stopped_by is signal.SIGUSR1
    assert capfd.readouterr().err == f"{numbers[0].name}: stopping after this step\n"


def test_a_warning_that_interrupts_the_handler_counts_too(capfd: pytest.CaptureFixture[str]) -> None:
    """Python runs the handler of a signal anywhere in that of another one; so it does here, at each of its opcodes."""
    opcode, interrupted = 0, True
    while interrupted:
        opcode += 1
        with build_manager("off") as manager:
            manager.stop_on_signal()
            interrupted = _interrupted_at(opcode, signal.SIGTERM, signal.SIGUSR2)
            assert manager.should_stop()
            assert manager.stopped_by is (signal.SIGUSR2 if interrupted else signal.SIGTERM), opcode
            assert capfd.readouterr().err.count("stopping after this step\n") == 1
    assert opcode > 20


def _interrupted_at(opcode: int, number: signal.Signals, by: signal.Signals) -> bool:
    """Run the handler of a signal, and before one of its opcodes that of another; False: it has fewer opcodes."""
    handler, left = signal.getsignal(number), opcode
    assert callable(handler)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode" and (left := left - 1) == 0:
            sys.settrace(None)
            handler(by, None)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        handler(number, None)
    finally:
        sys.settrace(before)
    return left <= 0


def test_only_the_named_signals_are_caught(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with build_manager("off") as manager:
        manager.stop_on_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGUSR1) is before
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_stop()


@pytest.mark.parametrize(
    ("signals", "code", "error", "text"),
    [
        (("USR1",), 85, CheckpointTypeError, r"signals such as signal.SIGUSR1, got 'USR1'\."),
        ((1000,), 85, CheckpointTypeError, r"signals such as signal.SIGUSR1, got 1000\."),
        ((signal.SIGKILL,), 85, CheckpointTypeError, r"SIGKILL cannot be caught; name one that can, such as"),
        ((), 0, CheckpointConfigError, r"an exit code from 1 to 255, got 0; 0 means success"),
        ((), 256, CheckpointConfigError, r"an exit code from 1 to 255, got 256"),
        ((), "85", CheckpointConfigError, r"an exit code from 1 to 255, got '85'"),
    ],
)
def test_wrong_arguments(signals: Any, code: Any, error: type[Exception], text: str) -> None:
    before = [signal.getsignal(number) for number in STOPPING]
    with build_manager("off") as manager, pytest.raises(error, match=text):
        manager.stop_on_signal(*signals, requeue_exit_code=code)
    assert [signal.getsignal(number) for number in STOPPING] == before


@pytest.mark.parametrize(
    ("number", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 85), ("SIGUSR2", 85), ("SIGXCPU", 85)]
)
def test_exit_codes(number: str, code: int, tmp_path: Path) -> None:
    with build_manager("sync", NOTHING_BY_ITSELF, dir=tmp_path) as manager:
        manager.stop_on_signal(getattr(signal, number))
        manager.maybe_save(1, {"weight": torch.ones(2)})
        os.kill(os.getpid(), getattr(signal, number))
        assert manager.should_stop()
        with pytest.raises(CheckpointError, match="after the manager's with block"):
            manager.exit_if_stopped()
    assert manager.steps() == [1]
    with pytest.raises(SystemExit) as exit:
        manager.exit_if_stopped()
    assert exit.value.code == code


def test_without_a_stop_it_does_not_exit() -> None:
    with build_manager("off") as manager:
        pass
    manager.exit_if_stopped()
    with build_manager("off") as manager:
        manager.stop_on_signal(requeue_exit_code=1)
        assert not manager.should_stop()
        os.kill(os.getpid(), signal.SIGUSR1)  # after the last step: the job is done
    manager.exit_if_stopped()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 0), (signal.SIGTERM, 143)])
def test_a_handler_from_before_gets_the_signal_after_the_save(number: signal.Signals, code: int) -> None:
    calls: list[int] = []
    before = signal.signal(number, lambda got, frame: calls.append(got))
    try:
        with build_manager("off") as manager:
            manager.stop_on_signal()
            os.kill(os.getpid(), number)
            assert manager.should_stop() and not calls
        with pytest.raises(SystemExit) as exit:
            manager.exit_if_stopped()
    finally:
        signal.signal(number, before)
    assert calls == [number] and exit.value.code == code


def test_a_warning_that_comes_during_the_last_save_counts(tmp_path: Path) -> None:
    class Slow:
        def state_dict(self) -> dict[str, int]:
            os.kill(os.getpid(), signal.SIGUSR1)
            return {"value": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError

    with build_manager("sync", NOTHING_BY_ITSELF, dir=tmp_path) as manager:
        manager.stop_on_signal(requeue_exit_code=255)
        manager.maybe_save(1, {"slow": Slow()})
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_stop()
    with pytest.raises(SystemExit) as exit:
        manager.exit_if_stopped()
    assert exit.value.code == 255 and manager.steps() == [1]


@pytest.mark.slow
def test_a_save_that_is_cut_off_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    code = """
import logging, os, signal, sys, torch
from ckpt_component import build_manager
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
slow = ["checkpoint.save.every_steps=null", "checkpoint.writer.max_bytes_per_second=100000"]
state = {"weight": torch.ones(10)}
with build_manager("async_persistent", slow, dir="run") as manager:
    manager.stop_on_signal()
    for step in range((manager.restore(state) or 0) + 1, 3):
        if step == 1:
            manager.save(step, state)
            manager.wait()
        else:
            state["large"] = torch.ones(1_000_000)
            os.kill(os.getpid(), signal.SIGTERM)
        manager.maybe_save(step, state)
        if manager.should_stop():
            break
"""
    first = subprocess.Popen(
        [sys.executable, "-u", "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert first.stdout is not None
    lines = []
    try:
        for line in first.stdout:
            lines.append(line)
            if line.startswith("iter_0000002 staged"):
                break
        time.sleep(0.2)
    finally:
        os.killpg(first.pid, signal.SIGKILL)  # what a scheduler does when the grace period is over
    first.communicate(timeout=30)
    said = "SIGTERM: saving step 2; until it is committed, the newest checkpoint is that of step 1\n"
    assert lines.count(said) == 1
    with build_manager("async_persistent", dir=tmp_path / "run") as manager:
        assert manager.restore({"weight": torch.ones(10)}) == 1


def test_handlers_are_as_before_afterwards(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in STOPPING]
    for failure in (False, True):
        try:
            with build_manager("off") as manager:
                manager.stop_on_signal()
                manager.stop_on_signal()
                assert signal.getsignal(signal.SIGTERM) != before[0]
                if failure:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert [signal.getsignal(number) for number in STOPPING] == before


def test_it_must_be_asked_for() -> None:
    with build_manager("off") as manager, pytest.raises(CheckpointError, match=r"Call stop_on_signal\(\) before"):
        manager.should_stop()


def test_outside_the_main_thread_it_says_what_it_cannot_do(caplog: pytest.LogCaptureFixture) -> None:
    def use() -> None:
        with build_manager("off") as manager:
            manager.stop_on_signal()
            assert not manager.should_stop()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(10)
    assert "training runs outside the main thread, so a SIGTERM will end it without a save" in caplog.messages


@pytest.mark.slow
@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM"])
def test_a_sigint_after_another_signal_ends_at_once(first: str) -> None:
    code = f"""
import os, signal
from ckpt_component import build_manager
with build_manager("off") as manager:
    manager.stop_on_signal()
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


class _Pair(LocalCoordinator):
    """The leader of two ranks, of which the other one has caught `other`, a signal."""

    def __init__(self, outside: Outside) -> None:
        super().__init__(outside)
        self.world_size = 2
        self.other = 0
        self.closed = False
        self.deadlines: list[float] = []

    def meet(
        self, name: str, value: Any, decide: Callable[[list[Any]], Any], deadline: float, about: str | None = None
    ) -> Any:
        """Decide from both."""
        self.deadlines.append(deadline)
        return decide([value, self.other])

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def outside() -> SetTime:
    return SetTime()


@pytest.fixture
def pair(outside: SetTime) -> Iterator[tuple[StopSignals, _Pair]]:
    """What one of two ranks has to stop by, with signal handlers of its own."""
    ranks = _Pair(outside)
    signals = StopSignals(ranks, 7.0, [signal.SIGUSR1, signal.SIGTERM], 85, owns_ranks=False)
    yield signals, ranks
    signals.close()


def test_two_ranks_exchange_about_once_a_second_what_they_have_caught(
    pair: tuple[StopSignals, _Pair], outside: SetTime
) -> None:
    """And after the first step, when nobody knows yet how long a step takes."""
    signals, ranks = pair
    asked_after = []
    for step in range(1, 21):
        outside.time += 0.25 if step <= 13 else 3.0
        asked = len(ranks.deadlines)
        assert signals.agreed() is None
        if len(ranks.deadlines) > asked:
            assert ranks.deadlines[-1] == outside.time + 7.0
            asked_after.append(step)
    assert asked_after == [1, 5, 9, 13, 17, 18, 19, 20]


def test_two_ranks_that_are_quick_exchange_after_a_hundred_steps_at_the_latest(
    pair: tuple[StopSignals, _Pair],
) -> None:
    signals, ranks = pair
    for _ in range(201):
        assert signals.agreed() is None
    assert len(ranks.deadlines) == 3


@pytest.mark.parametrize(
    ("mine", "other", "agreed", "code"),
    [
        (signal.SIGTERM, 0, signal.SIGTERM, 143),
        (0, signal.SIGTERM, signal.SIGTERM, 143),
        (0, signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR1, 85),
        (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1, 85),
    ],
)
def test_two_ranks_stop_by_what_one_of_them_has_caught(
    mine: int, other: int, agreed: signal.Signals, code: int, pair: tuple[StopSignals, _Pair]
) -> None:
    signals, ranks = pair
    assert signals.agreed() is None
    ranks.other = other
    if mine:
        signal.raise_signal(signal.Signals(mine))
    steps = 0
    while (found := signals.agreed()) is None:
        steps += 1
        assert steps < 101
    assert found is agreed
    ranks.other, asked = 0, len(ranks.deadlines)
    for _ in range(200):
        assert signals.agreed() is agreed  # once and for all
    assert len(ranks.deadlines) == asked
    signals.close()
    with pytest.raises(SystemExit) as exit:
        signals.exit()
    assert exit.value.code == code


@pytest.mark.parametrize("own", [False, True])
def test_a_coordinator_that_was_made_for_the_signals_is_closed_with_them(own: bool) -> None:
    ranks = _Pair(SetTime())
    loop = StoppableLoop(OwnerProcess("loop"), (lambda: ranks) if own else ranks, 7.0)
    loop.stop_on_signal(signal.SIGUSR1)
    assert not ranks.closed
    loop.stop_catching()
    assert ranks.closed == own


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize("function", ["one_gets_a_signal", "without_checkpoints", "one_does_not_ask"])
def test_on_two_ranks(function: str, tmp_path: Path) -> None:
    run_ranks(SCRIPT, function, 2, tmp_path)
