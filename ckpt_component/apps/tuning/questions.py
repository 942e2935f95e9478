"""What is asked, and how an answer is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

#: A setting that is not the present one is chosen only when it is better by more than this share, and than noise.
MARGIN = 0.05


@dataclass(frozen=True)
class Question:
    """One setting, which is tried with some values while the others stand still.

    Attributes:
        key: the setting as an override has it: `checkpoint.writer.workers`, `checkpoint/stager`.
        values: the values; the first is the one to start with.
        figure: what decides, the less the better: `durable`, or `lost`.
        why: what it is about, for people.
    """

    key: str
    values: Sequence[str]
    figure: str
    why: str


@dataclass(frozen=True)
class Answer:
    """The value that a question was answered with, and why.

    Attributes:
        key: the question's.
        value: the chosen one.
        reason: in one line, with the figures.
    """

    key: str
    value: str
    reason: str


def questions(cores: int, writers: Sequence[str]) -> list[Question]:
    """All questions, in the order that they are asked in.

    Args:
        cores: of this machine.
        writers: the formats to choose from; with fewer than two there is nothing to ask.
    """
    # 2 is the default, and stays unless another is better.
    workers = [count for count in (2, 1, 4, 8) if count <= max(2, cores)]
    formats = [Question("checkpoint/writer", writers, "durable", "the format")] if len(writers) > 1 else []
    return [
        *formats,
        Question("checkpoint.writer.workers", [str(count) for count in workers], "durable", "parallel writers"),
        Question("checkpoint.writer.block_bytes", ["8388608", "1048576", "33554432"], "durable", "bytes a write call"),
        Question("checkpoint.writer.io", ["auto", "buffered", "direct"], "durable", "with or past the page cache"),
        Question("checkpoint/stager", ["shared_memory", "pinned", "zero_overhead"], "lost", "who takes the snapshot"),
    ]


def choose(question: Question, figures: Mapping[str, Sequence[float]]) -> Answer:
    """The value to go on with.

    The first value stays unless another is better by more than `MARGIN` and by more than the rounds of either value
    differ among themselves.

    Args:
        question: what was asked.
        figures: value -> the figure of each round, in seconds; none of those that failed, but at least one.
    """
    first = question.values[0]
    # Time lost is a difference of two times, and below nothing only by noise.
    medians = {value: max(0.0, median(rounds)) for value, rounds in figures.items()}
    best = min(medians, key=lambda value: medians[value])
    seconds = ", ".join(f"{medians[value]:.3f} s with {value}" for value in medians)
    if first not in medians:
        return Answer(question.key, best, f"{first} does not work here; {question.figure} {seconds}")
    rounds = figures[first], figures[best]
    noise = max(max(values) - min(values) for values in rounds)
    noise = max(noise, -min(map(min, rounds)))
    gain = medians[first] - medians[best]
    if best == first:
        value, reason = first, "no other is better"
    elif gain <= noise:
        value, reason = first, f"{best} is better within noise: rounds differ by {noise:.3f} s"
    elif gain <= MARGIN * medians[first]:
        value, reason = first, f"{best} is less than {MARGIN:.0%} better"
    else:
        value, reason = best, f"rounds differ by no more than {noise:.3f} s"
    return Answer(question.key, value, f"{reason}; {question.figure} {seconds}")
