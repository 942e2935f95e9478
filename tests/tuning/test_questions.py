"""How an answer is chosen."""

from __future__ import annotations

import pytest

from ckpt_component.config import resolve_config
from ckpt_component.tuning.questions import Question, choose, questions

QUESTION = Question("checkpoint.writer.workers", ["2", "1", "4"], "durable", "parallel writers")


@pytest.mark.parametrize(
    ("figures", "value", "reason"),
    [
        ({"2": [2.0], "1": [3.0], "4": [1.0]}, "4", "durable 1.000 s against 2.000 s with 2"),
        ({"2": [1.0], "1": [3.0]}, "2", "durable 1.000 s is the least (3.000 s with 1)"),
        # Better by 4 %, and better than a median that has lower repeats: noise, and the first stays.
        ({"2": [1.0], "4": [0.96]}, "2", "no more than noise"),
        ({"2": [0.5, 2.0, 2.0], "4": [1.0, 1.0, 1.0]}, "2", "against 2.000 s with 2 (lowest 0.500)"),
        ({"2": [2.0, 2.0, 9.0], "4": [1.0, 1.0, 9.0]}, "4", "durable 1.000 s against 2.000 s with 2"),
        ({"2": [], "4": [1.0]}, "4", "and 2 does not work here"),
        # Time lost can be below nothing; less of it than noise is no gain.
        ({"2": [-0.1], "4": [-0.101]}, "2", "no more than noise"),
    ],
)
def test_the_best_is_chosen_when_it_stands_out(figures: dict[str, list[float]], value: str, reason: str) -> None:
    answer = choose(QUESTION, figures)
    assert answer is not None and answer.value == value and reason in answer.reason


def test_nothing_measured_has_no_answer() -> None:
    assert choose(QUESTION, {"2": []}) is None


def test_the_questions_are_about_keys_that_exist() -> None:
    for question in questions(8, ["dcp", "torch_save"]):
        for value in question.values:
            resolve_config("async_persistent", [f"{question.key}={value}"])
    assert {question.figure for question in questions(1, ["dcp"])} == {"durable", "lost"}
    [workers] = [q for q in questions(1, ["dcp"]) if q.key.endswith("workers")]
    assert workers.values == ["2", "1"]  # no more than the machine has, but the default
