"""The sweep of questions, with a stand-in for what measures; and that itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpt_component.apps.tuning import measure
from ckpt_component.apps.tuning.measure import Trial
from ckpt_component.apps.tuning.tune import Wish, tune
from ckpt_component.config.errors import CheckpointConfigError

#: Values that make a save quick.
QUICK = ["checkpoint/writer=torch_save", "checkpoint.writer.workers=1", "checkpoint.writer.io=direct"]


class StandIn:
    """Says how long a candidate took: the last of its values makes it quick. `io=auto` fails."""

    def __init__(self, state: str, nbytes: int | None, preset: str, folder: str) -> None:
        self.state_bytes = 10**9
        self.took_s = list[float]()

    def measure(self, overrides: Sequence[str], lost: bool) -> dict[str, float]:
        self.took_s.append(10.0)
        last = next(reversed(overrides), "")
        if last.endswith("io=auto"):
            raise OSError("no such trial")
        seconds = 1.0 if last in QUICK else 2.0
        return {"first_stall": 3.0, "stall": 0.5, "durable": seconds, **({"lost": seconds} if lost else {})}


def wish(folder: Path, **changed: Any) -> Wish:
    usual: dict[str, Any] = {"nbytes": None, "seconds": 1000.0, "repeats": 2, "writers": ["dcp", "torch_save"]}
    return Wish(folder, "tiny", preset="async_persistent", **{**usual, **changed})


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "Trial", StandIn)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})


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
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("stand_in")
def test_what_is_fixed_is_not_asked(tmp_path: Path) -> None:
    fixed = ["checkpoint/writer=dcp", "checkpoint.writer.io=buffered", "checkpoint.writer.checksum=auto"]
    keys = {answer.key for answer in tune(wish(tmp_path, fixed=fixed), lambda text: None)}
    assert keys == {"checkpoint.writer.workers", "checkpoint.writer.block_bytes", "checkpoint/stager"}


@pytest.mark.usefixtures("stand_in")
def test_what_does_not_fit_into_the_time_is_left_out_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    # Two rounds of two values fit; of three they do not.
    answers = tune(wish(tmp_path, seconds=50.0, writers=[]), said.append)
    assert [answer.key for answer in answers] == ["checkpoint.writer.workers"]
    assert (
        "--seconds=50 is too short for checkpoint.writer.block_bytes, checkpoint.writer.io, checkpoint/stager"
        in said[-1]
    )
    with pytest.raises(CheckpointConfigError, match="--seconds=5 is too short for .*; type a larger --seconds, or a"):
        tune(wish(tmp_path, seconds=5.0), lambda text: None)


def test_a_question_without_an_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(StandIn):
        def measure(self, overrides: Sequence[str], lost: bool) -> dict[str, float]:
            self.took_s.append(0.1)
            if overrides:
                raise OSError("it broke")
            return {}

    monkeypatch.setattr(measure, "Trial", Broken)
    with pytest.raises(CheckpointConfigError, match="No value of checkpoint/writer works in .*it broke"):
        tune(wish(tmp_path), lambda text: None)
    assert list(tmp_path.iterdir()) == []


def test_a_trial_measures_and_leaves_nothing(tmp_path: Path) -> None:
    trial = Trial("tiny", 100_000, "async_persistent", str(tmp_path))
    figures = trial.measure(["checkpoint.writer.io=buffered"], lost=False)
    assert set(figures) == {"first_stall", "stall", "durable"} and min(figures.values()) > 0
    with pytest.raises(CheckpointConfigError, match="workers must be from 1 to 128, got 0"):
        trial.measure(["checkpoint.writer.workers=0"], lost=False)
    assert trial.state_bytes >= 100_000 and trial.took_s[0] > 0 and list(tmp_path.iterdir()) == []
