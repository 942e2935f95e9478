"""The short sweep of `ckpt tune`: one question after the other, each with the answers so far."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ..bench.child import run_process
from ..bench.place import place
from ..config.errors import CheckpointConfigError
from ..sweeps.text import aligned
from .questions import Answer, Question, choose, questions

#: Not -m: the package is found where it is, installed or not.
_BOOT = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from ckpt_component.tuning.measure import main; sys.exit(main(sys.argv[1:]))"
)
#: A process that hangs is ended so long after its share of the time is over: its first rounds always run.
_GRACE_S = 900.0


@dataclass(frozen=True)
class Wish:
    """What to tune for.

    Attributes:
        folder: where checkpoints will be; all that is written there is removed.
        state: the kind of state, one of `bench.schema.STATES`.
        nbytes: its size; None: as the kind has it.
        seconds: about how long all may take.
        repeats: rounds for each question, fewer when the time is short.
        preset: what is tuned.
        writers: the formats to choose from.
        fixed: overrides that stay as they are.
    """

    folder: Path
    state: str
    nbytes: int | None
    seconds: float
    repeats: int
    preset: str
    writers: Sequence[str]
    fixed: Sequence[str] = ()


@dataclass
class _Measured:
    """What came of one value of a question."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None

    def values(self, figure: str) -> list[float]:
        return [run[figure] for run in self.runs]


def tune(wish: Wish, say: Callable[[str], None]) -> list[Answer]:
    """Ask all questions; prints a table for each, and why it chooses what.

    Args:
        wish: what to tune for.
        say: gets the text.

    Returns:
        The answers, in the order of the questions; none for a setting that `wish.fixed` has.

    Raises:
        CheckpointConfigError: no folder can be made in the target, or a question has no value that works.
    """
    fixed = {override.partition("=")[0].lstrip("+") for override in wish.fixed}
    asked = [question for question in questions(_cores(), wish.writers) if question.key not in fixed]
    deadline = time.monotonic() + wish.seconds
    answers: list[Answer] = []
    with place(wish.folder, "the folder ") as base:
        for number, question in enumerate(asked):
            share = max(0.0, deadline - time.monotonic()) / (len(asked) - number)
            say(f"\n{question.key}: {question.why}, by {question.figure}")
            measured = _ask(wish, question, answers, base, share)
            say(_table(question, measured))
            found = {value: entry.values(question.figure) for value, entry in measured.items()}
            answer = choose(question, found)
            if answer is None:
                reasons = [entry.error for entry in measured.values() if entry.error]
                reason = reasons[0] if reasons else "nothing was measured"
                raise CheckpointConfigError(f"No value of {question.key} works in {wish.folder}: {reason}")
            say(f"-> {answer.key}={answer.value}: {answer.reason}")
            answers.append(answer)
    return answers


def _ask(wish: Wish, question: Question, answers: Sequence[Answer], base: str, seconds: float) -> dict[str, _Measured]:
    """Every value in turn, in a process of their own."""
    chosen = [*wish.fixed, *(f"{answer.key}={answer.value}" for answer in answers)]
    folder, results, log = (os.path.join(base, name) for name in ("data", "results", "log"))
    os.mkdir(folder)
    task = {
        "state": wish.state,
        "nbytes": wish.nbytes,
        "folder": folder,
        "results": results,
        "preset": wish.preset,
        "candidates": [[*chosen, f"{question.key}={value}"] for value in question.values],
        "rounds": wish.repeats,
        "deadline": time.monotonic() + seconds,  # the same clock in all processes
        "lost": question.figure == "lost",
    }
    root = str(Path(__file__).resolve().parents[2])
    with open(log, "wb") as output:
        code = run_process([sys.executable, "-c", _BOOT, root, json.dumps(task)], output, seconds + _GRACE_S)
    measured = {value: _Measured() for value in question.values}
    for line in _lines(results):
        run = json.loads(line)
        entry = measured[question.values[run["candidate"]]]
        if "error" in run:
            entry.error = run["error"]
        else:
            entry.runs.append(run)
    if code != 0:
        said = _lines(log)
        reason = "it hung and was killed" if code is None else f"code {code}: {said[-1] if said else 'no message'}"
        for entry in measured.values():
            if not entry.runs and entry.error is None:
                entry.error = f"the measuring process ended before ({reason})"
    for path in (results, log):
        if os.path.exists(path):
            os.unlink(path)
    shutil.rmtree(folder)  # a process that was killed has left something
    return measured


def _table(question: Question, measured: dict[str, _Measured]) -> str:
    figures = ["first_stall", "stall", "durable", *(["lost"] if question.figure == "lost" else [])]
    lines = [["", *(name.replace("_", " ") + " s" for name in figures), "GB/s", "repeats", ""]]
    for value, entry in measured.items():
        cells = ["-"] * (len(figures) + 1)
        if entry.runs:
            cells = [f"{median(entry.values(name)):.3f}" for name in figures]
            cells.append(f"{entry.runs[0]['state_bytes'] / 1e9 / median(entry.values('durable')):.2f}")
        lines.append([value, *cells, str(len(entry.runs)), "" if entry.error is None else f"FAILED: {entry.error}"])
    return "\n".join(aligned(lines, left=[0, len(lines[0]) - 1]))


def _lines(path: str) -> list[str]:
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", errors="replace") as file:
        # A line that the process did not end is no result.
        return [line for line in file.read().split("\n")[:-1] if line.strip()]


def _cores() -> int:
    return len(os.sched_getaffinity(0))
