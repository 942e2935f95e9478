"""The sweep of `ckpt tune`: answers the questions in turn, each with the previous answers applied."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from ckpt_component.cli.output import Table
from ckpt_component.config.hydra.hydra_errors import HydraConfigError

from .questions import Answer, Knob, choose

if TYPE_CHECKING:
    from .measure import Trial

#: A single round gives no estimate of noise.
ROUNDS = 2

#: The figures of each round of one value, or the error text if the value failed.
Outcome = list[dict[str, float]] | str


def tune(
    trial: Trial, questions: Sequence[Knob], fixed: Sequence[str], *, seconds: float, repeats: int
) -> list[Answer]:
    """Answer as many questions as time allows; prints a table and the reason of the choice for each.

    Args:
        trial: takes the measurements
        questions: the questions, in order
        fixed: overrides for all measurements
        seconds: approximate time limit for all questions
        repeats: rounds per question, at least two; fewer if time is short

    Returns:
        The answers in the order of the questions, without those that there was no time for.

    Raises:
        CheckpointConfigError: no value of a question works, or the time is too short for any question
    """
    deadline = time.monotonic() + seconds
    answers, unanswered = list[Answer](), list[str]()
    trial.measure(fixed, lost=False)  # uncounted: the first measurement of a process takes longer
    for number, question in enumerate(questions):
        left = deadline - time.monotonic()
        if ROUNDS * len(question.values) * fmean(trial.took_s) > left:
            unanswered.append(question.key)
            continue
        print(f"\n{question.key}: {question.why}, by {question.figure}", flush=True)
        overrides = [*fixed, *(f"{answer.key}={answer.value}" for answer in answers)]
        outcomes = _ask(question, overrides, trial, repeats, left / (len(questions) - number))
        print(_table(question, outcomes, trial.state_bytes))
        errors = {value: outcome for value, outcome in outcomes.items() if isinstance(outcome, str)}
        if len(errors) == len(outcomes):
            raise HydraConfigError(f"No value of {question.key} works here: {errors[question.values[0]]}")
        rounds = {
            value: [figures[question.figure] for figures in outcome]
            for value, outcome in outcomes.items()
            if not isinstance(outcome, str)
        }
        answers.append(choose(question, rounds))
        print(f"-> {answers[-1].key}={answers[-1].value}: {answers[-1].reason}", flush=True)
    if unanswered:
        text = f"--seconds={seconds:g} is too short for {', '.join(unanswered)}"
        if not answers:
            raise HydraConfigError(f"{text}; type a larger --seconds, or a smaller --size.")
        print(f"\n{text}, which keep the preset's values; a larger --seconds measures all")
    return answers


def _ask(question: Knob, overrides: Sequence[str], trial: Trial, repeats: int, seconds: float) -> Mapping[str, Outcome]:
    """Measure every value in turn for several rounds; after two rounds it stops when the time is over."""
    outcomes: dict[str, Outcome] = {value: [] for value in question.values}
    until = time.monotonic() + seconds
    for number in range(repeats):
        if number >= ROUNDS and time.monotonic() + len(outcomes) * fmean(trial.took_s) > until:
            break
        first = number % len(outcomes)  # each round begins with another value
        for value in [*question.values[first:], *question.values[:first]]:
            outcome = outcomes[value]
            if isinstance(outcome, str):
                continue
            try:
                outcome.append(trial.measure([*overrides, f"{question.key}={value}"], lost=question.figure == "lost"))
            except Exception as error:  # the other values are still measured
                outcomes[value] = f"{type(error).__name__}: {error}".splitlines()[0]
    return outcomes


def _table(question: Knob, outcomes: Mapping[str, Outcome], state_bytes: int) -> str:
    names = ["first_stall", "stall", "durable", *(["lost"] if question.figure == "lost" else [])]
    lines = [["", *(name.replace("_", " ") + " s" for name in names), "GB/s", "repeats", ""]]
    for value, outcome in outcomes.items():
        if isinstance(outcome, str):
            lines.append([value, *("-" for _ in names), "-", "-", f"FAILED: {outcome}"])
            continue
        medians = {name: median(figures[name] for figures in outcome) for name in names}
        speed = f"{state_bytes / 1e9 / medians['durable']:.2f}"
        lines.append([value, *(f"{medians[name]:.3f}" for name in names), speed, str(len(outcome)), ""])
    return "\n".join(Table(lines, left=(0, -1)).text())
