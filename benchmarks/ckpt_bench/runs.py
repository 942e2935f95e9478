"""Measure rows in turn, each in a fresh process with a deadline."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .child import package_roots, run_process
from .measure.row_kinds import LIMITS, ROWS
from .peer_environment import PeerEnvironment

#: Keys of a run without figures: the row failed, or could not be measured.
ERROR, ABSENT = "error", "absent"
_NOT_ON_CUDA = "on device=cuda only rows of ours and of torch are measured"
#: Not -m: our folders must be last on the path, so that the peers' packages take precedence over packages next to ours.
BOOT = (
    "import sys; sys.path += sys.argv.pop(1).split(':'); "
    "from ckpt_bench.measure.process import main; sys.exit(main(sys.argv[1:]))"
)

Run = dict[str, Any]


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


class Runner:
    """Runs the processes of rows.

    Args:
        peers: the environment of the peers
        settings: arguments of `measure.row.RowSettings`, except `cold`
        repeats: how often to measure each row
        timeout: time limit of a row's process in seconds
        logs: folder for the output of failed rows
        say: prints a line of progress
        boot: code that measures a row; its arguments are the folder of our package and the task
    """

    def __init__(
        self,
        peers: PeerEnvironment,
        settings: dict[str, Any],
        *,
        repeats: int,
        timeout: float,
        logs: Path,
        say: Callable[[str], None],
        boot: str = BOOT,
    ) -> None:
        self._peers = peers
        self._settings = settings
        self._repeats = repeats
        self._timeout = timeout
        self._logs = logs
        self._say = say
        self._boot = boot

    def measure(self, case: Case, rows: Sequence[str], base: str, tell: Callable[[str, Run], None]) -> None:
        """Measure all rows of a case, in turn, and the limits with them.

        Args:
            case: receives the figures
            rows: the rows; unavailable ones are recorded as such
            base: folder on the target, for a temporary folder per process
            tell: called with each row and its figures when they are available
        """
        absent = self._peers.absent(rows)
        if self._settings.get("device") == "cuda":
            absent |= {row: _NOT_ON_CUDA for row in rows if ROWS[row].family == "peers"}
        for row in (LIMITS, *rows):
            case.rows[row] = [{ABSENT: absent[row]}] if row in absent else []
            if row in absent:
                self._say(f"{case.state} on {case.target}: {row} is not measured: {absent[row]}")
        began, done = time.monotonic(), 0
        rows_there = [row for row in case.rows if row not in absent]
        for repeat in range(self._repeats):
            for row in rows_there:
                name = f"{case.state} on {case.target}, repeat {repeat + 1} of {self._repeats}: {row}"
                ahead = self._repeats * len(rows_there) - done
                left = f", about {_minutes((time.monotonic() - began) / done * ahead)}" if done else ""
                self._say(f"{name} ({ahead} to go{left})")
                done += 1
                started = time.monotonic()
                run = self._measure_once(row, case, base, repeat)
                case.rows[row].append(run)
                tell(row, run)
                if ERROR in run:
                    self._say(f"{name} FAILED after {time.monotonic() - started:.0f} s: {run[ERROR]}")

    def _measure_once(self, row: str, case: Case, base: str, repeat: int) -> Run:
        place = tempfile.mkdtemp(prefix="ckpt-bench-", dir=base)
        log = self._logs / f"{case.state}-{case.target}-{row}-{repeat}.log"
        try:
            data = os.path.join(place, "data")
            os.mkdir(data)
            result = os.path.join(place, "result.json")
            task = {
                "row": row,
                "state": case.state,
                "folder": data,
                "result": result,
                "settings": self._settings | {"cold": case.target == "disk"},
            }
            command = [self._peers.interpreter_of(row), "-c", self._boot, package_roots(), json.dumps(task)]
            with open(log, "wb") as output:
                code = run_process(command, output, self._timeout)
            run = read_result(result, code, log, self._timeout)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        if ERROR not in run:
            log.unlink()
        return run


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def read_result(path: str, code: int | None, log: Path, timeout: float) -> Run:
    """The figures of a process, or an error: its own, or the last line of its log."""
    if code is None:
        return {ERROR: f"killed: not done after {timeout:g} s"}
    try:
        with open(path, encoding="utf-8") as file:
            run: Run = json.load(file)
    except FileNotFoundError:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return {ERROR: f"ended with code {code}: {lines[-1] if lines else 'no message'}"}
    if code != 0 and ERROR not in run:
        return {ERROR: f"measured, and then ended with code {code}"}
    return run
