"""`ckpt trace` as a user meets it, and its file as Perfetto reads it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from run_events import STEP, write_run

from ckpt_component.cli.app import main


def ckpt(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def checked(path: Path) -> list[dict[str, Any]]:
    """The slices of a file, which is valid by Google's "Trace Event Format"."""
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] in ("ms", "ns")
    named, slices = set(), list[dict[str, Any]]()
    for event in document["traceEvents"]:
        assert type(event["pid"]) is int and type(event["tid"]) is int and type(event["name"]) is str
        if event["ph"] == "M":
            kind, _, what = event["name"].partition("_")
            assert kind in ("process", "thread") and set(event["args"]) == {what}
            named.add((kind, event["pid"], event["tid"] if kind == "thread" else 0))
            continue
        assert event["ts"] >= 0 and type(event["args"]) is dict and type(event["cat"]) is str
        assert ("thread", event["pid"], event["tid"]) in named and ("process", event["pid"], 0) in named
        assert event["ph"] == "X" and event["dur"] >= 0
        slices.append(event)
    threads = defaultdict(list)
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        threads[event["pid"], event["tid"]].append(event)
    for events in threads.values():  # slices of a thread follow each other or are inside of each other
        ends: list[float] = []
        for event in events:
            while ends and ends[-1] <= event["ts"] + 1:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1
            ends.append(event["ts"] + event["dur"])
    return slices


def of(slices: list[dict[str, Any]], kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return [event for event in slices if event["cat"] == kind and event["pid"] == rank]


def test_steps_go_on_while_the_writer_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", ranks=2)
    assert ckpt("trace", str(tmp_path / "run"), "--out", str(tmp_path / "trace.json")) == 0
    assert "trace.json: 3 saves of 2 ranks" in capsys.readouterr().out
    slices = checked(tmp_path / "trace.json")
    for rank in (0, 1):
        steps, writes, waits = (of(slices, kind, rank) for kind in ("step", "write", "wait"))
        assert [event["args"]["step"] for event in steps] == [*range(2, 61)]
        assert len(writes) == len(waits) == 3
        # What training waited for the save is no part of the next step.
        assert all(abs(event["dur"] - STEP * 1e6) < 2 for event in steps)
        for write in writes[:2]:  # no steps follow the last save
            end = write["ts"] + write["dur"]
            assert sum(write["ts"] < event["ts"] < end for event in steps) >= 2
    assert {event["args"]["bytes"] for event in of(slices, "commit")} == {10**9}


def test_a_phase_has_one_colour(tmp_path: Path) -> None:
    """Perfetto and chrome://tracing colour a slice by its name, so that a phase has one name at all steps and ranks."""
    end = write_run(tmp_path / "run", ranks=2)
    write_run(tmp_path / "run", ranks=2, first=61, began=end + 5)
    assert ckpt("trace", str(tmp_path / "run"), "--out", str(tmp_path / "trace.json")) == 0
    names, steps = defaultdict(set), set()
    for event in checked(tmp_path / "trace.json"):
        names[event["cat"]].add(event["name"])
        steps.add(event["args"]["step"])
    page = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    table = page.partition("| phase |")[2].partition("\n\n")[0]
    phases = {*re.findall(r"`(\w+)`", "".join(re.findall(r"^\|(.*?)\|", table, re.MULTILINE)))} - {"memory", "queue"}
    assert names == {**{phase: {phase} for phase in (*phases, "step", "load")}, "wait": {"training waits"}}
    assert steps == {60, *range(62, 121)}  # the load, and each step that has one before it


def test_the_newest_run_or_its_last_saves(tmp_path: Path) -> None:
    end = write_run(tmp_path / "run")
    write_run(tmp_path / "run", first=41, began=end + 5, failed=2)
    trace = ["trace", str(tmp_path / "run"), "--out", str(tmp_path / "trace.json")]
    assert ckpt(*trace) == 0
    slices = checked(tmp_path / "trace.json")
    assert [event["args"]["step"] for event in of(slices, "load")] == [40] and len(of(slices, "write")) == 3
    assert "the disk is full" in {event["args"]["error"] for event in of(slices, "wait")}
    assert ckpt(*trace, "--last", "2") == 0
    slices = checked(tmp_path / "trace.json")
    assert len(of(slices, "write")) == 2 and 20 <= len(of(slices, "step")) <= 21


@pytest.mark.slow
def test_the_picture_shows_each_save_with_its_steps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from ckpt_component.cli.reports.run_records import read_runs
    from ckpt_component.cli.reports.run_report import picture_of

    write_run(tmp_path / "run", ranks=2, failed=3)
    assert ckpt("report", str(tmp_path / "run"), "--out", str(tmp_path)) == 0
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    figure = picture_of(read_runs(tmp_path / "run")[0])
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles[0] == "save of step 20: training waits 10 ms; durable after 100 ms, 4 steps later"
    assert titles[2] == "save of step 60: failed after 70 ms; training waits 10 ms"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()][3:5] == ["rank 0 commit", "rank 1 training"]
    [legend] = figure.legends
    explained = [text.get_text() for text in legend.get_texts()]
    assert "wait for the writer (queue)" in explained and "wait for memory" not in explained  # no save had to


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "There is no folder nowhere"),
        (["above"], "above is not the folder of a run's checkpoints; type above/run"),
        (["above/run/iter_0000001"], "iter_0000001 is not the folder of a run's checkpoints; type above/run"),
        (["bare"], "bare has no events; runs write them with their first save"),
        (["above/run", "--last", "0"], "--last=0 must be at least 1"),
        (["above/run", "--out", "missing/trace.json"], "error: missing/trace.json cannot be written (No such file"),
    ],
)
def test_a_mistake_ends_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("bare/iter_0000001", "above/run/iter_0000001"):
        (tmp_path / folder).mkdir(parents=True)
    write_run(tmp_path / "above" / "run")
    assert ckpt("trace", *arguments) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "trace.json").exists()


@pytest.mark.slow
def test_a_real_run_with_three_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import time

    import torch

    from ckpt_component import build_manager

    slow = ["checkpoint.save.every_steps=null", "checkpoint.save.at_end=false", "checkpoint.writer.workers=1"]
    slow += ["checkpoint.writer.max_bytes_per_second=4000000", "checkpoint.writer.block_bytes=65536"]
    state, step = {"weight": torch.zeros(100_000)}, 0
    with build_manager("async_persistent", slow, dir=tmp_path / "run") as manager:
        for save in range(4):
            while step < 3 or len(manager.reports) < save:  # train until the last save is committed
                time.sleep(0.005)
                step += 1
                manager.maybe_save(step, state)
            if save < 3:
                manager.save(step, state)
    assert ckpt("trace", str(tmp_path / "run"), "--out", str(tmp_path / "trace.json")) == 0
    assert "3 saves of 1 rank\n" in capsys.readouterr().out
    slices = checked(tmp_path / "trace.json")
    writes = of(slices, "write")
    assert len(writes) == 3
    for write in writes:  # steps go on while the writer writes
        assert sum(write["ts"] < each["ts"] < write["ts"] + write["dur"] for each in of(slices, "step")) >= 2
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "run"), "--json"])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["committed"] == 3 and 0 <= run["kept"] < 1 and run["saves"][0]["write_s"] > 0.05


def test_the_trace_is_of_the_run_that_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end = write_run(tmp_path / "run", saves=2)
    write_run(tmp_path / "run", saves=0, first=41, began=end + 5)
    words = ("trace", str(tmp_path / "run"), "--out", str(tmp_path / "trace.json"))
    assert ckpt(*words) == 0
    assert "2 saves of 1 rank, run 1 of 2\n" in capsys.readouterr().out
    assert len(of(checked(tmp_path / "trace.json"), "write")) == 2
    assert ckpt(*words, "--run", "2") == 0
    assert "0 saves of 1 rank, run 2 of 2\n" in capsys.readouterr().out
