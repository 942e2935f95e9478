"""The questions of `ckpt tune`, and how their answers are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

#: Another value replaces the current one only if it is better by more than this fraction, and by more than the noise.
MARGIN = 0.05


@dataclass(frozen=True)
class Knob:
    """One setting to try with several values while all others are fixed.

    Attributes:
        key: the setting as in an override: `checkpoint.writer.workers`, `checkpoint/stager`
        values: the values; the first is the current one
        figure: the figure to minimise: `durable` or `lost`
        why: description of the setting
    """

    key: str
    values: Sequence[str]
    figure: str
    why: str


@dataclass(frozen=True)
class Answer:
    """The chosen value of a question, and why.

    Attributes:
        key: the question's key
        value: the chosen value
        reason: the reason in one line, with the figures
    """

    key: str
    value: str
    reason: str


def questions(cores: int, writers: Sequence[str]) -> list[Knob]:
    """All questions, in order.

    Args:
        cores: number of CPU cores of this machine
        writers: formats to choose from; fewer than two give no question
    """
    # Begins with the default, 2.
    workers = [count for count in (2, 1, 4, 8) if count <= max(2, cores)]
    formats = [Knob("checkpoint/writer", writers, "durable", "the format")] if len(writers) > 1 else []
    return [
        *formats,
        Knob("checkpoint.writer.workers", [str(count) for count in workers], "durable", "parallel writers"),
        Knob("checkpoint.writer.block_bytes", ["8388608", "1048576", "33554432"], "durable", "bytes a write call"),
        Knob("checkpoint.writer.io", ["auto", "buffered", "direct"], "durable", "with or without the page cache"),
        Knob("checkpoint/stager", ["shared_memory", "pinned", "zero_overhead"], "lost", "who takes the snapshot"),
    ]


def choose(question: Knob, figures: Mapping[str, Sequence[float]]) -> Answer:
    """Choose a value.

    The first value is kept unless another is better by more than `MARGIN` and by more than the variation between the
    rounds of either value.

    Args:
        question: the question
        figures: value -> its figure in each round, in seconds. Contains at least one value, and none that failed.
    """
    first = question.values[0]
    # Time lost is a difference of two times, so only noise makes it negative.
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
