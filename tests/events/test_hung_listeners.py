"""A listener that hangs, or tries to end its thread, stops nothing else: no save, upload, export, record or listener."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from outsides import Ending

from ckpt_component import CheckpointListener, SaveReport, build_manager
from ckpt_component.events import EventRecorder, read_events

QUICK = ("checkpoint.writer.io=buffered", "checkpoint.durability=process_crash", "checkpoint.save.at_end=false")
STATE = {"weight": torch.ones(3)}


class Hung(CheckpointListener):
    """Does not return from its first event until it is released, and notes the steps of all."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.steps: list[int | None] = []

    def on_committed(self, report: SaveReport) -> None:
        self.entered.set()
        self.release.wait(60)
        self.steps.append(report.step)


class Leaving(CheckpointListener):
    """Tries to end the thread that calls it, or the program."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = [SystemExit(9), KeyboardInterrupt(), GeneratorExit("enough")]
        self.steps: list[int | None] = []

    def on_committed(self, report: SaveReport) -> None:
        self.steps.append(report.step)
        raise self.errors[len(self.steps) - 1]


class Told(CheckpointListener):
    """Notes the steps."""

    def __init__(self) -> None:
        self.steps: list[int | None] = []

    def on_committed(self, report: SaveReport) -> None:
        self.steps.append(report.step)


@pytest.fixture
def hung() -> Iterator[Hung]:
    listener = Hung()
    yield listener
    listener.release.set()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


def test_uploads_records_and_other_listeners_continue_while_one_hangs(tmp_path: Path, hung: Hung) -> None:
    told = Told()
    overrides = [f"checkpoint.local.dir={tmp_path / 'fast'}", "checkpoint.timeouts.close=0.1"]
    with build_manager("sync", [*QUICK, *overrides], dir=tmp_path / "slow") as manager:
        manager.add_listener(hung)
        manager.add_listener(told)
        for step in (1, 2):
            manager.save(step, STATE)
            assert hung.entered.wait(60)
        until((tmp_path / "slow" / "iter_0000002").exists)
        until(lambda: told.steps == [1, 2])
        until(lambda: [e["step"] for e in read_events(tmp_path / "fast") if e["event"] == "save"] == [1, 2])
        assert not hung.steps


@pytest.mark.slow
def test_exports_continue_while_a_listener_hangs(tmp_path: Path, hung: Hung) -> None:
    overrides = ["export.format=torch", "export.every_steps=2", "timeouts.close=0.1"]
    with build_manager("sync", [*QUICK, *(f"checkpoint.{each}" for each in overrides)], dir=tmp_path) as manager:
        manager.add_listener(hung)
        for step in (1, 2):
            manager.save(step, STATE)
            assert hung.entered.wait(60)
        until((tmp_path / "exports" / "iter_0000002.pt").exists)
        assert not hung.steps


def test_the_lag_of_uploads_is_counted_while_a_listener_hangs(
    tmp_path: Path, hung: Hung, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = [
        "upload.max_bytes_per_second=1",
        "upload.max_lag_steps=3",
        "upload.finish_seconds=0.1",
        "timeouts.close=0.1",
    ]
    overrides += [f"local.dir={tmp_path / 'fast'}"]
    with build_manager(
        "sync", [*QUICK, *(f"checkpoint.{each}" for each in overrides)], dir=tmp_path / "slow"
    ) as manager:
        manager.add_listener(hung)
        for step in (1, 2, 6, 7):
            manager.save(step, STATE)
        assert lines(caplog, "6 steps behind step 6 ") and not hung.steps


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_a_listener_cannot_end_its_thread(preset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leaving, told = Leaving(), Told()
    with caplog.at_level(logging.ERROR), build_manager(preset, QUICK, dir=tmp_path) as manager:
        manager.add_listener(leaving)
        manager.add_listener(told)
        for step in (1, 2, 3):
            manager.save(step, STATE)
            manager.wait()
            assert told.steps[-1] == leaving.steps[-1] == step
    assert len(lines(caplog, "the listener Leaving failed in on_committed (SystemExit: 9)")) == len(caplog.records) == 1


def test_wait_and_close_wait_once_for_what_hangs(tmp_path: Path, hung: Hung, caplog: pytest.LogCaptureFixture) -> None:
    with build_manager("async_persistent", [*QUICK, "checkpoint.timeouts.close=0.1"], dir=tmp_path) as manager:
        manager.add_listener(hung)
        for step in (1, 2):
            manager.save(step, STATE)
            manager.wait()
        assert [report.outcome for report in manager.reports] == ["committed"] * 2
        hung.release.set()
        until(lambda: hung.steps == [1, 2])  # what it missed comes when it returns
    assert len(lines(caplog, "not waiting any longer for the listener Hung")) == 1


def test_a_listener_that_returns_is_waited_for_again(hung: Hung) -> None:
    recorder = EventRecorder(None, [hung])
    recorder.saved(SaveReport("x", step=1))
    recorder.drain(0.01)
    hung.release.set()
    until(lambda: hung.steps == [1])
    hung.entered.clear()
    recorder.saved(SaveReport("x", step=2))
    recorder.drain(60)
    assert hung.steps == [1, 2]
    recorder.close(60)


def test_a_warning_names_what_hangs_while_it_hangs_and_another_when_it_returns(
    hung: Hung, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = EventRecorder(None, [hung], slow_seconds=0.05)
    recorder.saved(SaveReport("x", step=1))
    until(lambda: lines(caplog, "the listener Hung has not returned from on_committed for 0.05 s"))
    hung.release.set()
    recorder.close(60)
    assert len(lines(caplog, "has not returned")) == len(lines(caplog, "has returned from on_committed after")) == 1


def test_events_that_a_listener_cannot_take_are_dropped_with_one_warning(
    hung: Hung, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = EventRecorder(None, [hung])
    for step in range(1500):
        recorder.saved(SaveReport("x", step=step))
    hung.release.set()
    recorder.close(60)
    assert 1000 <= len(hung.steps) <= 1001 and hung.steps[:2] == [0, 1]
    assert len(lines(caplog, "newer ones are dropped")) == 1


def test_events_are_told_by_the_caller_where_no_thread_starts_any_more(tmp_path: Path) -> None:
    """As from Python 3.12 on, while the interpreter ends."""
    names = "ckpt-events", "ckpt-listener", "ckpt-listener-watch"
    outside = Ending(*names, error="can't create new thread at interpreter shutdown")
    leaving = Leaving()
    with build_manager("async_persistent", QUICK, dir=tmp_path, outside=outside) as manager:
        manager.add_listener(leaving)
        for step in (1, 2):
            manager.save(step, STATE)
        manager.wait()
    assert leaving.steps == [1, 2]
    assert [event["step"] for event in read_events(tmp_path) if event["event"] == "save"] == [1, 2]
