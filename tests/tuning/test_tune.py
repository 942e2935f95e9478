"""The sweep of questions, with a stand-in for the measuring process; and that process itself."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_component.apps.tuning import measure
from ckpt_component.apps.tuning import tune as tuning
from ckpt_component.apps.tuning.tune import Wish, tune
from ckpt_component.config.errors import CheckpointConfigError

#: Says how long a candidate took: the last of its values makes it quick. One of them fails, and the process ends badly
#: where the stager is asked for.
STAND_IN = """
import json, os, sys
task = json.loads(sys.argv[2])
open(os.path.join(task["folder"], "left behind"), "w").close()
with open(task["results"], "a") as results:
    for number, overrides in enumerate(task["candidates"]):
        found = {"candidate": number, "state_bytes": 10**9}
        if overrides[-1].endswith("io=auto"):
            found["error"] = "OSError: no such trial"
        else:
            seconds = 1.0 if overrides[-1] in QUICK else 2.0
            found |= {"first_stall": 3.0, "stall": 0.5, "durable": seconds, "lost": seconds, "took_s": 0.1}
        print(json.dumps(found), file=results)
        print(json.dumps(found), file=results)
        if "stager=pinned" in overrides[-1]:
            print("half a li", end="", file=results, flush=True)
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(9)
"""
QUICK = ["checkpoint/writer=torch_save", "checkpoint.writer.workers=1", "checkpoint.writer.io=direct"]


def wish(folder: Path, **changed: Any) -> Wish:
    usual: dict[str, Any] = {"nbytes": None, "seconds": 5.0, "repeats": 1, "writers": ["dcp", "torch_save"]}
    return Wish(folder, "tiny", preset="async_persistent", **{**usual, **changed})


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_BOOT", STAND_IN.replace("QUICK", repr(QUICK)))


@pytest.mark.usefixtures("stand_in")
def test_every_question_is_asked_with_the_answers_so_far(tmp_path: Path) -> None:
    said: list[str] = []
    answers = tune(wish(tmp_path), said.append)
    assert {answer.key: answer.value for answer in answers} == {
        "checkpoint/writer": "torch_save",
        "checkpoint.writer.workers": "1",
        "checkpoint.writer.block_bytes": "8388608",
        "checkpoint.writer.io": "direct",
        "checkpoint/stager": "shared_memory",
    }
    text = "\n".join(said)
    assert "FAILED: OSError: no such trial" in text and "and auto does not work here" in text
    # What a process that died had measured counts, and what it had not is told.
    assert "zero_overhead" in text and "the measuring process ended before (code 9: out of memory)" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("stand_in")
def test_what_is_fixed_is_not_asked(tmp_path: Path) -> None:
    fixed = ["checkpoint/writer=dcp", "checkpoint.writer.io=buffered", "checkpoint.writer.checksum=auto"]
    keys = {answer.key for answer in tune(wish(tmp_path, fixed=fixed), lambda text: None)}
    assert keys == {"checkpoint.writer.workers", "checkpoint.writer.block_bytes", "checkpoint/stager"}


#: As if a process took 20 s to get ready and 10 s for each measurement, and there were 50 s; the clock stands still.
SLOW = """
import json, sys
task = json.loads(sys.argv[2])
with open(task["results"], "a") as results:
    print(json.dumps({"ready_s": 20.0}), file=results)
    if len(task["candidates"]) > FITS:
        print(json.dumps({"missing_s": 30.0}), file=results)
    else:
        found = {"state_bytes": 10**9, "first_stall": 3.0, "stall": 0.5, "durable": 1.0, "lost": 1.0, "took_s": 10.0}
        for number in range(len(task["candidates"])):
            print(json.dumps(found | {"candidate": number}), file=results)
            print(json.dumps(found | {"candidate": number}), file=results)
"""


def test_what_does_not_fit_into_the_time_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_cores", lambda: 1)
    monkeypatch.setattr(tuning, "_BOOT", SLOW.replace("FITS", "2"))
    said: list[str] = []
    answers = tune(wish(tmp_path, seconds=50.0, writers=[]), said.append)
    # Two values fit; for three, the process of a question found out, and then nobody asks the others.
    assert [answer.key for answer in answers] == ["checkpoint.writer.workers"]
    assert (
        "--seconds=50 is too short for checkpoint.writer.block_bytes, checkpoint.writer.io, checkpoint/stager"
        in said[-1]
    )
    enough = int(said[-1].partition("about --seconds=")[2].split()[0])
    assert 150 <= enough <= 300


def test_too_little_time_for_anything_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_BOOT", SLOW.replace("FITS", "0"))
    with pytest.raises(CheckpointConfigError, match="--seconds=5 is too short for .*; type a larger --seconds, or a"):
        tune(wish(tmp_path), lambda text: None)
    # Its process does not come to measure at all, and is ended soon after the time is over.
    monkeypatch.setattr(tuning, "_BOOT", "import time; time.sleep(600)")
    began = time.monotonic()
    with pytest.raises(CheckpointConfigError, match="--seconds=0.1 is too short for "):
        tune(wish(tmp_path, seconds=0.1, writers=[]), lambda text: None)
    assert time.monotonic() - began < 60 and list(tmp_path.iterdir()) == []


def test_a_question_without_an_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_BOOT", "import sys; sys.exit('it broke')")
    with pytest.raises(CheckpointConfigError, match="No value of checkpoint/writer works in .*it broke"):
        tune(wish(tmp_path), lambda text: None)
    assert list(tmp_path.iterdir()) == []


def test_candidates_take_turns_and_one_that_fails_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # main sets it for a process of its own
    (tmp_path / "data").mkdir()
    task = {
        "state": "tiny",
        "nbytes": 100_000,
        "folder": str(tmp_path / "data"),
        "results": str(tmp_path / "results"),
        "preset": "async_persistent",
        "candidates": [
            ["checkpoint.writer.io=buffered"],
            ["checkpoint.writer.workers=0"],
            ["checkpoint.writer.workers=1"],
        ],
        "rounds": 5,
        "started": time.monotonic(),
        "deadline": time.monotonic(),  # over: no more than the rounds that there must be
        "last": time.monotonic() + 1000,
        "lost": False,
    }
    assert measure.main([json.dumps(task)]) == 0
    runs = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert list(runs.pop(0)) == ["ready_s"]
    assert [run["candidate"] for run in runs] == [0, 1, 2, 2, 0]
    assert "workers must be from 1 to 128, got 0" in runs[1]["error"]
    measured = [run for run in runs if "error" not in run]
    assert all(run["durable"] > 0 and run["state_bytes"] >= 100_000 and run["took_s"] > 0 for run in measured)
    assert list((tmp_path / "data").iterdir()) == []
    # Where two rounds do not fit, it measures no more than it takes to find that out.
    (tmp_path / "results").unlink()
    assert measure.main([json.dumps(task | {"last": time.monotonic()})]) == 0
    runs = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert [list(run) for run in runs] == [["ready_s"], ["missing_s"]] and runs[1]["missing_s"] > 0
