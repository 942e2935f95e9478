"""Measure rows in turn, each in a fresh process with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .child import BOOT, Run, measure_in_child
from .measure.row_kinds import LIMITS, ROWS
from .peer_environment import PeerEnvironment
from .task import ERROR
from .time_budget import TimeBudget

#: Key of a run that could not be measured, with the reason; `ERROR` is that of one that failed.
ABSENT = "absent"
#: What the process of a row calls.
_CALL = "measure.row:measure"
_NO_TIME = "the time of budget= was over before its turn; type a longer one, such as budget=1h, or budget=null"
_NOT_ON_CUDA = "on device=cuda only rows of ours and of torch are measured"


@dataclass
class Case:
    """One state on one target.

    Attributes:
        state: name of the state
        target: `disk` or `tmpfs`
        rows: runs by row, including the limits, in the order of the table
    """

    state: str
    target: str
    rows: dict[str, list[Run]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs the processes of rows.

    Attributes:
        peers: the environment of the peers
        settings: arguments of `measure.row.RowSettings`, except `cold`
        repeats: how often to measure each row
        timeout: time limit of a row's process in seconds
        logs: folder for the output of failed rows
        say: prints a line of progress
        boot: code that measures a row; its arguments are the folder of our package and the task
    """

    peers: PeerEnvironment
    settings: Mapping[str, Any]
    repeats: int
    timeout: float
    logs: Path
    say: Callable[[str], None]
    boot: str = BOOT

    def measure(
        self, case: Case, rows: Sequence[str], base: str, tell: Callable[[str, Run], None], budget: TimeBudget
    ) -> None:
        """Measure all rows of a case, in turn, and the limits with them.

        Args:
            case: receives the figures
            rows: the rows; unavailable ones are recorded as such
            base: folder on the target, for a temporary folder per process
            tell: called with each row and its figures when they are available
            budget: the time of the case. A repeat begins if it is over in time, going by the one before.
        """
        where = f"{case.state} on {case.target}"
        absent = self.peers.absent(rows)
        if self.settings.get("device") == "cuda":
            absent |= {row: _NOT_ON_CUDA for row in rows if ROWS[row].family == "peers"}
        for row in (LIMITS, *rows):
            case.rows[row] = [{ABSENT: absent[row]}] if row in absent else []
            if row in absent:
                self.say(f"{where}: {row} is not measured: {absent[row]}")
        there = [row for row in case.rows if row not in absent]
        settings = {**self.settings, "cold": case.target == "disk"}
        settings["enough_seconds"] = min(settings["enough_seconds"], budget.enough_seconds(len(there)))
        began, done, took = time.monotonic(), 0, 0.0
        for repeat in range(self.repeats):
            if repeat and not budget.has(took):
                self.say(f"{where}: {repeat} of {self.repeats} repeats, because budget= has no time for another")
                break
            repeat_began = time.monotonic()
            for place, row in enumerate(there):
                share = budget.timeout(len(there) - place)
                if share <= 0:
                    case.rows[row] = case.rows[row] or [{ABSENT: _NO_TIME}]
                    continue
                name = f"{where}, repeat {repeat + 1} of {self.repeats}: {row}"
                ahead = self.repeats * len(there) - done
                to_go = min((time.monotonic() - began) / done * ahead, budget.left) if done else None
                self.say(f"{name} ({ahead} to go{'' if to_go is None else f', about {duration(to_go)}'})")
                done, started = done + 1, time.monotonic()
                log = self.logs / f"{case.state}-{case.target}-{row}-{repeat}.log"
                arguments = {"row": row, "state": case.state, "settings": settings}
                command = self.peers.interpreter_of(row), self.boot
                timeout, limit = min((self.timeout, "row_timeout"), (share, "budget"))
                run = measure_in_child(_CALL, arguments, base, log, timeout, limit, command=command)
                case.rows[row].append(run)
                tell(row, run)
                if ERROR in run:
                    self.say(f"{name} FAILED after {time.monotonic() - started:.0f} s: {run[ERROR]}")
            took = time.monotonic() - repeat_began


def duration(seconds: float) -> str:
    """A time for people, in seconds or minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
