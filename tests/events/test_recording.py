"""What a manager records and tells: a line per save and load in the folder, and calls of listeners."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from outsides import SetTime
from ranks import run_ranks

from ckpt_component import CheckpointManager, build_checkpointer, build_manager
from ckpt_component.core.outside import Outside
from ckpt_component.core.waits import Waits
from ckpt_component.errors import CheckpointConfigError, CheckpointTypeError
from ckpt_component.events import CheckpointListener, EventFile, EventRecorder, LoadReport, SaveReport, read_events
from ckpt_component.events.recorder import StepTimes

PRESETS = ("sync", "async_persistent", "async_zero_overhead")
QUICK = ("checkpoint.save.every_steps=2", "checkpoint.writer.io=buffered", "checkpoint.durability=process_crash")


def state_of(step: int = 0) -> dict[str, Any]:
    return {"weight": torch.full((300,), float(step)), "step": step}


def manager_in(root: Path, *overrides: str, preset: str = "sync") -> CheckpointManager:
    return build_manager(preset, [*QUICK, *overrides], dir=root)


def events_of(root: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(root) if event["event"] == kind]


class Told(CheckpointListener):
    """Notes which methods were called, for which step, and on which thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int | None]] = []
        self.threads: set[str] = set()
        self.reports: list[SaveReport | LoadReport] = []

    def note(self, name: str, report: SaveReport | LoadReport) -> None:
        self.calls.append((name, report.step))
        self.reports.append(report)
        self.threads.add(threading.current_thread().name)

    def on_staged(self, report: SaveReport) -> None:
        self.note("staged", report)

    def on_written(self, report: SaveReport) -> None:
        self.note("written", report)

    def on_committed(self, report: SaveReport) -> None:
        self.note("committed", report)

    def on_failed(self, report: SaveReport) -> None:
        self.note("failed", report)

    def on_restored(self, report: LoadReport) -> None:
        self.note("restored", report)

    def close(self) -> None:
        self.calls.append(("close", None))


@pytest.mark.parametrize(
    "preset",
    ["async_persistent", *(pytest.param(each, marks=pytest.mark.slow) for each in ("sync", "async_zero_overhead"))],
)
def test_a_run_records_its_saves_steps_and_loads(preset: str, tmp_path: Path) -> None:
    begun = time.time()
    for first in (1, 6):
        with manager_in(tmp_path, preset=preset) as manager:
            assert manager.restore(state_of()) == (None if first == 1 else 5)
            for step in range(first, first + 5):
                manager.maybe_save(step, state_of(step))
                manager.wait_staged()
    runs, saves, loads = (events_of(tmp_path, kind) for kind in ("run", "save", "load"))
    assert len({run["run"] for run in runs}) == len(runs) == 2
    assert runs[0]["preset"] == preset and runs[0]["world_size"] == 1 and runs[0]["pid"] == os.getpid()
    assert runs[0]["writer"] == "dcp" and runs[0]["versions"].keys() == {"ckpt_component", "torch", "python"}
    assert [(save["step"], save["outcome"], save["attempts"]) for save in saves] == [
        (step, "committed", 1) for step in (2, 4, 5, 6, 8, 10)
    ]
    for save in saves:
        spans = save["spans"]
        assert save["path"] == manager.path_of(save["step"]) and save["bytes"] > 1200 and save["items"] == 2
        assert begun <= save["time"] <= time.time() and save["error"] is None and "reused_bytes" not in save
        phases = ["plan", "memory", "stage", "queue", "write", "sync", "vote", "commit"]
        assert [phase for phase in spans if phase != "memory"] == [phase for phase in phases if phase != "memory"]
        assert preset == "sync" or save["step"] != 2 or list(spans) == phases  # the first save makes the memory
        # One after the other, and each begins where the one before has ended or later.
        ends = [end for span in spans.values() for end in span]
        assert ends == sorted(ends) and ends[0] == 0
        assert 0 < save["stall_s"] <= save["lost_s"]
        assert (save["host_memory_bytes"] == 0) == (preset == "sync")  # how much: tests/saving/test_resources.py
    (load,) = loads
    assert (load["step"], load["outcome"], load["verified"]) == (5, "loaded", True)
    assert load["bytes"] > 1200 and list(load["spans"]) == ["open", "match", "read"] and load["run"] == runs[1]["run"]
    steps = [
        (event["first"] + number, end)
        for event in events_of(tmp_path, "steps")
        for number, end in enumerate(event["ends"])
    ]
    assert [step for step, _ in steps] == [*range(1, 11)] and [end for _, end in steps] == sorted(
        end for _, end in steps
    )


def test_listeners_are_told_in_order_on_one_thread(tmp_path: Path) -> None:
    told = Told()
    with manager_in(tmp_path, preset="async_persistent") as manager:
        manager.add_listener(told)
        manager.restore(state_of())
        manager.save(1, state_of(1))
        manager.wait()
        assert told.calls == [("staged", 1), ("written", 1), ("committed", 1)]
        assert [report.outcome for report in told.reports] == ["staged", "written", "committed"]
        manager.restore(state_of())
    manager.wait()  # after the end: nothing to wait for
    assert told.calls[3:] == [("restored", 1), ("close", None)]
    assert told.threads == {"ckpt-listener"} and told.reports[2] == manager.reports[0]


def test_failed_and_skipped_saves_are_told_and_recorded(tmp_path: Path) -> None:
    told = Told()
    with manager_in(tmp_path, "checkpoint.on_error=warn", "checkpoint.save.at_end=false") as manager:
        manager.add_listener(told)
        (tmp_path / "iter_0000001").mkdir()
        (tmp_path / "iter_0000001" / "mine").touch()
        assert not manager.save(1, state_of(1))
        assert not manager.save(2, {"bad": torch.zeros(3, device="meta")})
    assert told.calls == [("failed", 1), ("failed", 2), ("close", None)]
    first, second = events_of(tmp_path, "save")
    assert first["outcome"] == second["outcome"] == "failed"
    assert "exists" in first["error"] and "meta" in second["error"] and first["stall_s"] > 0


def test_a_failed_load_is_recorded_with_its_error(tmp_path: Path) -> None:
    with manager_in(tmp_path) as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(2))
    (data,) = [
        path
        for path in (tmp_path / "iter_0000002").iterdir()
        if path.name.endswith("_0.distcp") and path.stat().st_size > 1200
    ]
    data.write_bytes(data.read_bytes().replace(b"\0\0\0\x40", b"\0\0\0\x41"))
    told = Told()
    with manager_in(tmp_path, preset="async_persistent") as manager:
        manager.add_listener(told)
        assert manager.restore(state_of()) == 1
    loads = events_of(tmp_path, "load")
    assert [(load["step"], load["outcome"]) for load in loads] == [(2, "failed"), (1, "loaded")]
    assert "checksum" in loads[0]["error"].lower() and [e["step"] for e in events_of(tmp_path, "quarantine")] == [2]
    assert told.calls == [("restored", 1), ("close", None)]


def test_a_listener_that_raises_is_logged_once_and_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(CheckpointListener):
        def on_committed(self, report: SaveReport) -> None:
            raise ValueError(f"no network for step {report.step}")

    told = Told()
    with caplog.at_level(logging.ERROR), manager_in(tmp_path) as manager:
        manager.add_listener(Broken())
        manager.add_listener(told)
        for step in (1, 2, 3):
            assert manager.save(step, state_of(step))
    assert [record.exc_text.count("for step 1") for record in caplog.records if record.exc_text] == [1]
    assert [step for name, step in told.calls if name == "committed"] == [1, 2, 3]


def test_what_is_no_listener_is_refused(tmp_path: Path) -> None:
    with (
        manager_in(tmp_path, "checkpoint.save.at_end=false") as manager,
        pytest.raises(CheckpointTypeError, match="no listener"),
    ):
        manager.add_listener(print)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_an_events_folder_that_cannot_be_written_is_one_warning(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "events"
    place.write_text("mine") if kind == "file" else place.symlink_to("/proc/1/nothing")
    with caplog.at_level(logging.WARNING), manager_in(tmp_path) as manager:
        for step in (1, 2, 3):
            assert manager.save(step, state_of(step))
    assert manager.steps() == [1, 2, 3]
    assert len([record for record in caplog.records if "events" in record.getMessage()]) == 1


def test_without_events_and_in_runs_that_only_restore_nothing_is_written(tmp_path: Path) -> None:
    with manager_in(tmp_path, "checkpoint.events=false") as manager:
        manager.save(1, state_of(1))
    assert not (tmp_path / "events").exists()
    reads = ("checkpoint.save.every_steps=null", "checkpoint.save.at_end=false")
    with manager_in(tmp_path, *reads) as manager:
        assert manager.restore(state_of()) == 1
    assert not (tmp_path / "events").exists()
    with manager_in(tmp_path, *reads) as manager:
        assert manager.restore(state_of()) == 1
        manager.save(2, state_of(2))  # a loop that decides by itself when to save
    assert [event["event"] for event in read_events(tmp_path)] == ["run", "load", "steps", "save"]


def test_deleted_checkpoints_are_recorded_and_the_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with manager_in(tmp_path, "checkpoint.keep.last=1") as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
    assert [event["step"] for event in events_of(tmp_path, "delete")] == [1]
    with manager_in(tmp_path) as manager:
        assert manager.steps() == [2] and manager.restore(state_of()) == 2


def test_a_checkpointer_tells_listeners_and_writes_no_file(tmp_path: Path) -> None:
    told = Told()
    with build_checkpointer("async_persistent", QUICK[1:]) as checkpointer:
        checkpointer.add_listener(told)
        checkpointer.save(state_of(3), tmp_path / "step-3")
        checkpointer.wait()
        checkpointer.load(tmp_path / "step-3", state_of())
    assert told.calls == [("staged", None), ("written", None), ("committed", None), ("restored", 3), ("close", None)]
    assert os.listdir(tmp_path) == ["step-3"]
    assert checkpointer.last_load is not None and checkpointer.last_load.verified


@pytest.mark.slow
def test_each_rank_records_its_part_under_one_token(tmp_path: Path) -> None:
    run_ranks(Path(__file__).parent / "scripts" / "two_ranks.py", "saves", 2, tmp_path)
    assert sorted(os.listdir(tmp_path / "run" / "events")) == ["rank-00000.jsonl", "rank-00001.jsonl"]
    events = list(read_events(tmp_path / "run"))
    assert len({event["run"] for event in events}) == 1
    for rank in (0, 1):
        saves = [event for event in events if event["rank"] == rank and event["event"] == "save"]
        assert [save["step"] for save in saves] == [2, 4] and all(save["items"] == 1 for save in saves)
    assert len({save["files"] for save in events_of(tmp_path / "run", "save")}) == 1


def test_a_process_killed_while_it_records_leaves_lines_that_can_be_read(tmp_path: Path) -> None:
    code = (
        "import sys; from ckpt_component.events import EventFile; file = EventFile(sys.argv[1], 0)\n"
        "for number in range(10**6): file.append([{'event': 'steps', 'number': number, 'ends': [0.5] * 999}])"
    )
    path = tmp_path / "events" / "rank-00000.jsonl"
    for run in (1, 2):
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as process:
            before, deadline = path.stat().st_size if run == 2 else 0, time.monotonic() + 60
            while (not path.exists() or path.stat().st_size < before + 100_000) and time.monotonic() < deadline:
                time.sleep(0.01)
            process.kill()
        numbers = [event["number"] for event in read_events(tmp_path)]
        # Each process counts from 0; of a torn line nothing is seen.
        assert numbers.count(0) == run and all(after in (number + 1, 0) for number, after in pairwise(numbers))


def test_what_a_save_costs_is_estimated_from_the_steps() -> None:
    outside = SetTime()
    times = StepTimes(outside)
    for step in range(1, 31):
        # The save of step 10 blocks for 0.5 s, and then 5 steps take 0.03 s instead of 0.02 s.
        outside.time += (0.5 if step == 11 else 0.0) + (0.03 if 11 <= step <= 15 else 0.02)
        times.ended(step)
        times.ended(step)  # `maybe_save` and `save` both say so
    ((event),) = times.take()
    assert event["first"] == 1 and len(event["ends"]) == 30 and not times.take()
    began = event["ends"][9]
    assert times.lost(began, 0.5, began + 0.66) == pytest.approx(0.55)
    assert StepTimes().lost(began, 0.5, began + 0.66) == 0.5


@pytest.mark.slow
def test_listeners_that_cannot_be_built_are_refused(tmp_path: Path) -> None:
    for value, text in (
        ("[tensorbord]", r"Did you mean checkpoint\.listeners=\[tensorboard\]"),
        ("[3]", "give names"),
        ("[{_target_: torch.nn.Linear}]", "is not a"),
    ):
        with pytest.raises(CheckpointConfigError, match=text):
            manager_in(tmp_path, f"checkpoint.listeners={value}")


def test_a_long_wait_of_the_process_is_recorded_when_it_is_shown_and_when_it_has_ended(tmp_path: Path) -> None:
    class Quick(Outside):
        """Its threads wait in real time, and what they wait for is told of at another one."""

        def __init__(self) -> None:
            self.waits = Waits(lambda: seconds[0], self.date)

    seconds, outside = [100.0], Quick()
    recorder = EventRecorder(EventFile(str(tmp_path), 0), outside=outside)

    def wait_for(whom: str) -> None:
        seconds[0] = 100.0
        with outside.waits.on(whom, 160.0) as wait:
            seconds[0] = 106.0
            wait.look()

    wait_for("rank 3, which has not voted")
    recorder.close(60.0)
    wait_for("nobody, as the run is over")
    shown, ended = [event for event in read_events(tmp_path) if event["event"] == "wait"]
    assert shown["for"] == ended["for"] == "rank 3, which has not voted" and shown["since"] == ended["since"]
    assert shown["until"] - shown["since"] == pytest.approx(60.0, abs=0.01)
    assert shown["ended"] is None and ended["ended"] is not None
