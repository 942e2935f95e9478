"""The sweep of questions, with a stand-in for what measures; and that itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from ckpt_bench.tuning.measure import Trial
from ckpt_bench.tuning.questions import Answer, questions
from ckpt_bench.tuning.tune import tune

from ckpt_component.config.hydra.hydra_errors import CheckpointConfigError

#: Values that make a save quick.
QUICK = ["checkpoint/writer=torch_save", "checkpoint.writer.workers=1", "checkpoint.writer.io=direct"]


def figures(overrides: Sequence[str]) -> dict[str, float]:
    last = next(reversed(overrides), "")
    if last.endswith("io=auto"):
        raise OSError("no such trial")
    seconds = 1.0 if last in QUICK else 2.0
    return {"first_stall": 3.0, "stall": 0.5, "durable": seconds, "lost": seconds}


class StandIn:
    """Says that every measurement takes 10 s."""

    def __init__(self, measure: Callable[[Sequence[str]], dict[str, float]]) -> None:
        self.state_bytes = 10**9
        self.took_s = list[float]()
        self._measure = measure

    def measure(self, overrides: Sequence[str], lost: bool) -> dict[str, float]:
        self.took_s.append(10.0)
        return self._measure(overrides)


def tuned(
    measure: Callable[[Sequence[str]], dict[str, float]] = figures,
    writers: Sequence[str] = ("dcp", "torch_save"),
    seconds: float = 1000.0,
    **more: Any,
) -> list[Answer]:
    trial = cast(Trial, StandIn(measure))
    return tune(trial, questions(2, writers), **{"fixed": [], "seconds": seconds, "repeats": 2, **more})


def test_every_question_is_asked_with_the_answers_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    measured = list[list[str]]()

    def measure(overrides: Sequence[str]) -> dict[str, float]:
        measured.append(list(overrides))
        return figures(overrides)

    answers = tuned(measure, fixed=["checkpoint.writer.checksum=auto"])
    assert {answer.key: answer.value for answer in answers} == {
        "checkpoint/writer": "torch_save",
        "checkpoint.writer.workers": "1",
        "checkpoint.writer.block_bytes": "8388608",
        "checkpoint.writer.io": "direct",
        "checkpoint/stager": "shared_memory",
    }
    assert measured[-1][:3] == ["checkpoint.writer.checksum=auto", *QUICK[:2]]
    text = capsys.readouterr().out
    assert "FAILED: OSError: no such trial" in text and "auto does not work here" in text


def test_what_does_not_fit_into_the_time_is_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    # Two rounds of two values fit; of three they do not.
    assert [answer.key for answer in tuned(writers=[], seconds=50.0)] == ["checkpoint.writer.workers"]
    assert (
        "--seconds=50 is too short for checkpoint.writer.block_bytes, checkpoint.writer.io, checkpoint/stager"
        in capsys.readouterr().out
    )
    with pytest.raises(CheckpointConfigError, match="--seconds=5 is too short for .*; type a larger --seconds, or a"):
        tuned(seconds=5.0)


def test_a_question_without_an_answer_is_an_error() -> None:
    def measure(overrides: Sequence[str]) -> dict[str, float]:
        if overrides:
            raise OSError("it broke")
        return {}

    with pytest.raises(CheckpointConfigError, match="No value of checkpoint/writer works here: OSError: it broke"):
        tuned(measure)


@pytest.mark.slow
def test_a_trial_measures_and_leaves_nothing(tmp_path: Path) -> None:
    trial = Trial("tiny", 100_000, "async_persistent", str(tmp_path))
    times = trial.measure(["checkpoint.writer.io=buffered"], lost=False)
    assert set(times) == {"first_stall", "stall", "durable"} and min(times.values()) > 0
    with pytest.raises(CheckpointConfigError, match="workers must be from 1 to 128, got 0"):
        trial.measure(["checkpoint.writer.workers=0"], lost=False)
    assert trial.state_bytes >= 100_000 and trial.took_s[0] > 0 and list(tmp_path.iterdir()) == []
