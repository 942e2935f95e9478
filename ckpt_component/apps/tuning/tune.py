"""The short sweep of `ckpt tune`: one question after the other, each with the answers so far."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ...config.errors import HydraConfigError
from ..bench.child import run_process
from ..bench.place import place
from ..sweeps.text import aligned
from .measure import ROUNDS
from .questions import Answer, Question, choose, questions

#: Not -m: the package is found where it is, installed or not.
_BOOT = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from ckpt_component.apps.tuning.measure import main; sys.exit(main(sys.argv[1:]))"
)
#: Shares of the time that the first two rounds of a question may take beyond it, and after which its process is ended.
_LATE, _KILLED = 0.1, 0.15


@dataclass(frozen=True)
class Wish:
    """What to tune for.

    Attributes:
        folder: where checkpoints will be; all that is written there is removed.
        state: the kind of state, one of `bench.schema.STATES`.
        nbytes: its size; None: as the kind has it.
        seconds: how long all may take.
        repeats: rounds for each question, at least two; fewer when the time is short.
        preset: what is tuned.
        writers: the formats to choose from; fewer than two: the format stays.
        fixed: overrides that stay as they are.
        started: when the time began, of the monotonic clock.
    """

    folder: Path
    state: str
    nbytes: int | None
    seconds: float
    repeats: int
    preset: str
    writers: Sequence[str]
    fixed: Sequence[str] = ()
    started: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        """When the time is over."""
        return self.started + self.seconds


@dataclass
class _Measured:
    """What came of one value of a question."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None

    def values(self, figure: str) -> list[float]:
        return [run[figure] for run in self.runs]


@dataclass
class _Pace:
    """How long questions take, as seen so far."""

    ready_s: float = 0.0
    took_s: list[float] = field(default_factory=list)

    def needed(self, question: Question) -> float:
        """Seconds that a question takes at the least; 0 before the first one."""
        return self.ready_s + ROUNDS * len(question.values) * median(self.took_s) if self.took_s else 0.0


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
    fixed = {override.partition("=")[0].lstrip("+") for override in wish.fixed}
    asked = [question for question in questions(_cores(), wish.writers) if question.key not in fixed]
    answers: list[Answer] = []
    left_out: dict[str, float] = {}  # to how many seconds it would have taken
    pace = _Pace()
    with place(wish.folder, "the folder ") as base:
        for number, question in enumerate(asked):
            left = wish.deadline - time.monotonic()
            lacking = pace.needed(question) - left
            if lacking > _LATE * wish.seconds:
                left_out[question.key] = lacking if not left_out else pace.needed(question)
                continue
            say(f"\n{question.key}: {question.why}, by {question.figure}")
            measured, missing = _ask(wish, question, answers, base, left / (len(asked) - number), pace)
            if missing is not None:
                say("not measured: two rounds do not fit into the time")
                left_out[question.key] = missing
                continue
            say(_table(question, measured))
            answer = choose(question, {value: entry.values(question.figure) for value, entry in measured.items()})
            if answer is None:
                reasons = [entry.error for entry in measured.values() if entry.error]
                reason = reasons[0] if reasons else "nothing was measured"
                raise HydraConfigError(f"No value of {question.key} works in {wish.folder}: {reason}")
            say(f"-> {answer.key}={answer.value}: {answer.reason}")
            answers.append(answer)
    if left_out:
        more = "a larger --seconds"
        if pace.took_s:
            enough = max(1.1 * (time.monotonic() - wish.started + sum(left_out.values())), 1.15 * wish.seconds)
            more = f"about --seconds={10 * math.ceil(enough / 10)}"
        text = f"--seconds={wish.seconds:g} is too short for {', '.join(left_out)}"
        if not answers:
            raise HydraConfigError(f"{text}; type {more}, or a smaller --size.")
        say(f"\n{text}, which stay{'s' * (len(left_out) == 1)} as the preset has it; {more} is enough for all")
    return answers


def _ask(
    wish: Wish, question: Question, answers: Sequence[Answer], base: str, share: float, pace: _Pace
) -> tuple[dict[str, _Measured], float | None]:
    """Every value in turn, in a process of their own. Also gives the seconds that two rounds lack, if they do."""
    chosen = [*wish.fixed, *(f"{answer.key}={answer.value}" for answer in answers)]
    folder, results, log = (os.path.join(base, name) for name in ("data", "results", "log"))
    os.mkdir(folder)
    started = time.monotonic()  # the same clock in all processes
    task = {
        "state": wish.state,
        "nbytes": wish.nbytes,
        "folder": folder,
        "results": results,
        "preset": wish.preset,
        "candidates": [[*chosen, f"{question.key}={value}"] for value in question.values],
        "rounds": wish.repeats,
        "started": started,
        "deadline": min(started + share, wish.deadline),
        "last": wish.deadline + _LATE * wish.seconds,
        "lost": question.figure == "lost",
    }
    root = str(Path(__file__).resolve().parents[3])
    patience = max(0.0, wish.deadline - started) + _KILLED * wish.seconds
    with open(log, "wb") as output:
        code = run_process([sys.executable, "-c", _BOOT, root, json.dumps(task)], output, patience)
    measured = {value: _Measured() for value in question.values}
    missing: float | None = None
    for line in _lines(results):
        run = json.loads(line)
        pace.ready_s = run.get("ready_s", pace.ready_s)
        missing = run.get("missing_s")
        if "candidate" not in run:
            continue
        entry = measured[question.values[run["candidate"]]]
        if "error" in run:
            entry.error = run["error"]
        else:
            entry.runs.append(run)
            pace.took_s.append(run["took_s"])
    if code is None and any(len(entry.runs) < ROUNDS and entry.error is None for entry in measured.values()):
        missing = pace.needed(question)
    elif code not in (0, None):
        output_lines = _lines(log)
        reason = f"code {code}: {output_lines[-1] if output_lines else 'no message'}"
        for entry in measured.values():
            if not entry.runs and entry.error is None:
                entry.error = f"the measuring process ended before ({reason})"
    for path in (results, log):
        if os.path.exists(path):
            os.unlink(path)
    shutil.rmtree(folder)  # a process that was killed has left something
    return measured, missing


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
