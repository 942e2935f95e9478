"""What is asked, and how an answer is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

#: A setting that is not the present one is chosen only when it is better by more than this share.
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
        writers: the formats to choose from.
    """
    # 2 is the default, and stays unless another is better.
    workers = [count for count in (2, 1, 4, 8) if count <= max(2, cores)]
    return [
        Question("checkpoint/writer", writers, "durable", "the format"),
        Question("checkpoint.writer.workers", [str(count) for count in workers], "durable", "parallel writers"),
        Question("checkpoint.writer.block_bytes", ["8388608", "1048576", "33554432"], "durable", "bytes a write call"),
        Question("checkpoint.writer.io", ["auto", "buffered", "direct"], "durable", "with or past the page cache"),
        Question("checkpoint/stager", ["shared_memory", "pinned", "zero_overhead"], "lost", "who takes the snapshot"),
    ]


def choose(question: Question, figures: Mapping[str, Sequence[float]]) -> Answer | None:
    """The value to go on with; None when none could be measured.

    Args:
        question: what was asked.
        figures: value -> the figure of each repeat, in seconds; none of those that failed.
    """
    measured = {value: figures[value] for value in question.values if figures.get(value)}
    if not measured:
        return None
    first, medians = question.values[0], {value: median(repeats) for value, repeats in measured.items()}
    best = min(medians, key=lambda value: medians[value])
    told = f"{question.figure} {medians[best]:.3f} s"
    if first not in measured:
        return Answer(question.key, best, f"{told}, and {first} does not work here")
    before = f"{medians[first]:.3f} s with {first}"
    if best == first:
        others = ", ".join(f"{medians[value]:.3f} s with {value}" for value in medians if value != first)
        return Answer(question.key, best, f"{told} is the least" + (f" ({others})" if others else ""))
    gain = medians[first] - medians[best]
    if gain <= MARGIN * abs(medians[first]) or medians[best] >= min(measured[first]):
        lowest = min(measured[first])
        return Answer(
            question.key,
            first,
            f"{best} has {told} against {before} (lowest {lowest:.3f}), which is no more than noise",
        )
    return Answer(question.key, best, f"{told} against {before}")
