"""How an answer is chosen."""

from __future__ import annotations

import pytest
from ckpt_bench.tuning.questions import Knob, choose, questions

from ckpt_component.config import resolve_config

QUESTION = Knob("checkpoint.writer.workers", ["2", "1", "4"], "durable", "parallel writers")


@pytest.mark.parametrize(
    ("figures", "value", "reason"),
    [
        (
            {"2": [2.0, 2.1], "1": [3.0, 3.0], "4": [1.0, 1.1]},
            "4",
            "rounds differ by no more than 0.100 s; durable 2.050 s with 2, 3.000 s with 1, 1.050 s with 4",
        ),
        ({"2": [1.0, 1.1], "1": [3.0, 3.0]}, "2", "no other is better; durable 1.050 s with 2, 3.000 s with 1"),
        # Sure, and not worth it.
        ({"2": [1.0, 1.0], "4": [0.96, 0.96]}, "2", "4 is less than 5% better"),
        # Worth it, and not sure: the rounds of one or the other differ by as much.
        ({"2": [1.0, 1.5], "4": [0.9, 0.9]}, "2", "within noise: rounds differ by 0.500 s"),
        ({"2": [1.5, 1.5], "4": [1.0, 1.6]}, "2", "within noise: rounds differ by 0.600 s"),
        ({"2": [0.5, 2.0, 2.0], "4": [1.0, 1.0, 1.0]}, "2", "within noise: rounds differ by 1.500 s"),
        ({"4": [1.0, 1.0]}, "4", "2 does not work here; durable 1.000 s with 4"),
        # Time lost can be below nothing, but none is the least of it.
        ({"2": [0.001, 0.002], "4": [-0.03, -0.031]}, "2", "durable 0.002 s with 2, 0.000 s with 4"),
        ({"2": [-0.1, -0.1], "4": [-0.2, -0.2]}, "2", "no other is better; durable 0.000 s with 2"),
    ],
)
def test_the_best_is_chosen_when_it_stands_out(figures: dict[str, list[float]], value: str, reason: str) -> None:
    answer = choose(QUESTION, figures)
    assert answer.value == value and reason in answer.reason


@pytest.mark.slow
def test_the_questions_are_about_keys_that_exist() -> None:
    config = resolve_config("async_persistent")
    for question in questions(8, ["dcp", "torch_save"]):
        for value in question.values:
            resolve_config(config, [f"{question.key}={value}"])
    assert {question.figure for question in questions(1, ["dcp"])} == {"durable", "lost"}
    # The format stays unless there are some to choose from.
    assert not [q for writers in ([], ["dcp"]) for q in questions(8, writers) if q.key == "checkpoint/writer"]
    [workers] = [q for q in questions(1, ["dcp"]) if q.key.endswith("workers")]
    assert workers.values == ["2", "1"]  # no more than the machine has, but the default
