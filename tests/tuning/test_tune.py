"""The sweep of questions, with a stand-in for the measuring process; and that process itself."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_component.config.errors import CheckpointConfigError
from ckpt_component.tuning import measure
from ckpt_component.tuning import tune as tuning
from ckpt_component.tuning.tune import Wish, tune

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
            found |= {"first_stall": 3.0, "stall": 0.5, "durable": seconds, "lost": seconds}
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
        "deadline": time.monotonic(),  # over: no more than the rounds that there must be
        "lost": False,
    }
    assert measure.main([json.dumps(task)]) == 0
    runs = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert [run["candidate"] for run in runs] == [0, 1, 2, 2, 0]
    assert "workers must be at least 1, got 0" in runs[1]["error"]
    assert all(run["durable"] > 0 and run["state_bytes"] >= 100_000 for run in runs if "error" not in run)
    assert list((tmp_path / "data").iterdir()) == []
