"""The short sweep of `ckpt tune`: one question after the other, each with the answers so far."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from ...config.errors import HydraConfigError
from ..bench.place import place
from ..sweeps.text import aligned
from .questions import Answer, Question, choose, questions

if TYPE_CHECKING:
    from .measure import Trial

#: A single round gives no estimate of noise.
ROUNDS = 2


@dataclass(frozen=True)
class Wish:
    """What to tune for.

    Attributes:
        folder: where checkpoints will be; all that is written there is removed.
        state: the kind of state, one of `bench.schema.STATES`.
        nbytes: its size; None: as the kind has it.
        seconds: about how long all may take.
        repeats: rounds for each question, at least two; fewer when the time is short.
        preset: what is tuned.
        writers: the formats to choose from; fewer than two: the format stays.
        fixed: overrides that stay as they are.
    """

    folder: Path
    state: str
    nbytes: int | None
    seconds: float
    repeats: int
    preset: str
    writers: Sequence[str] = ()
    fixed: Sequence[str] = ()


@dataclass
class _Candidate:
    """What was measured of one value of a question: a round each, or the error that it failed with."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    error: str | None = None

    def values(self, figure: str) -> list[float]:
        return [figures[figure] for figures in self.rounds]


def tune(wish: Wish, say: Callable[[str], None]) -> list[Answer]:
    """Ask all questions that there is time for; prints a table for each, and why it chooses what.

    Args:
        wish: what to tune for.
        say: gets the text.

    Returns:
        The answers, in the order of the questions; none for a setting that `wish.fixed` has, nor for one that there was
        no time for.

    Raises:
        CheckpointConfigError: no folder can be made in the target, a question has no value that works, or the time is
            too short for any.
    """
    from .measure import Trial  # imports torch

    deadline = time.monotonic() + wish.seconds
    fixed = {override.partition("=")[0] for override in wish.fixed}
    cores = len(os.sched_getaffinity(0))
    asked = [question for question in questions(cores, wish.writers) if question.key not in fixed]
    answers, left_out = list[Answer](), list[str]()
    with place(wish.folder, "the folder ") as base:
        trial = Trial(wish.state, wish.nbytes, wish.preset, base)
        trial.measure(wish.fixed, lost=False)  # the first one of a process takes longer, and does not count
        for number, question in enumerate(asked):
            left = deadline - time.monotonic()
            if ROUNDS * len(question.values) * fmean(trial.took_s) > left:
                left_out.append(question.key)
                continue
            say(f"\n{question.key}: {question.why}, by {question.figure}")
            chosen = [*wish.fixed, *(f"{answer.key}={answer.value}" for answer in answers)]
            candidates = _ask(question, chosen, trial, wish.repeats, left / (len(asked) - number))
            say(_table(question, candidates, trial.state_bytes))
            answer = choose(question, {value: entry.values(question.figure) for value, entry in candidates.items()})
            if answer is None:
                reason = candidates[question.values[0]].error
                raise HydraConfigError(f"No value of {question.key} works in {wish.folder}: {reason}")
            say(f"-> {answer.key}={answer.value}: {answer.reason}")
            answers.append(answer)
    if left_out:
        text = f"--seconds={wish.seconds:g} is too short for {', '.join(left_out)}"
        if not answers:
            raise HydraConfigError(f"{text}; type a larger --seconds, or a smaller --size.")
        say(f"\n{text}, which stay{'s' * (len(left_out) == 1)} as the preset has it; a larger --seconds asks all")
    return answers


def _ask(
    question: Question, chosen: Sequence[str], trial: Trial, repeats: int, seconds: float
) -> dict[str, _Candidate]:
    """Measure every value in turn, some rounds over; no further round after two when the time is over."""
    candidates = {value: _Candidate() for value in question.values}
    until = time.monotonic() + seconds
    for number in range(repeats):
        if number >= ROUNDS and time.monotonic() + len(candidates) * fmean(trial.took_s) > until:
            break
        first = number % len(candidates)  # each time another value is the first
        for value in [*question.values[first:], *question.values[:first]]:
            if candidates[value].error is not None:
                continue
            try:
                figures = trial.measure([*chosen, f"{question.key}={value}"], lost=question.figure == "lost")
            except Exception as error:  # the other values are measured all the same
                candidates[value].error = f"{type(error).__name__}: {error}".splitlines()[0]
            else:
                candidates[value].rounds.append(figures)
    return candidates


def _table(question: Question, candidates: dict[str, _Candidate], state_bytes: int) -> str:
    figures = ["first_stall", "stall", "durable", *(["lost"] if question.figure == "lost" else [])]
    lines = [["", *(name.replace("_", " ") + " s" for name in figures), "GB/s", "repeats", ""]]
    for value, entry in candidates.items():
        cells = ["-"] * (len(figures) + 1)
        if entry.rounds:
            cells = [f"{median(entry.values(name)):.3f}" for name in figures]
            cells.append(f"{state_bytes / 1e9 / median(entry.values('durable')):.2f}")
        lines.append([value, *cells, str(len(entry.rounds)), "" if entry.error is None else f"FAILED: {entry.error}"])
    return "\n".join(aligned(lines, left=[0, len(lines[0]) - 1]))
