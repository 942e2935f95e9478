"""Medians with their range over the repeats of a run, and the files they are written to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ckpt_component.cli.reports.sweep_figures import FIGURES as SWEEP_FIGURES

from .kept import read_run, write_run
from .measure.row_kinds import LIMITS, ROWS
from .runs import ABSENT, Case
from .task import ERROR


class Column(NamedTuple):
    """A column of the table: its title, what its figure is multiplied by there, and with how many digits."""

    title: str
    factor: float = 1
    digits: int = 2


#: Figures of a row, in order, with the column of those that the table has. Times are in seconds.
FIGURES: Mapping[str, Column | None] = {
    "first_stall": Column("first stall", digits=3),
    "stall": Column("stall", digits=3),
    "staged": Column("staged", digits=3),
    "complete": Column("complete"),
    "durable": Column("durable"),
    "background": None,
    "lost": Column("lost", digits=3),
    "lost_cpu": Column("its CPU", digits=3),
    "lost_queue": Column("queued", digits=3),
    "step_ratio": Column("step x"),
    "next_steps": Column("next 10 x"),
    "memory": Column("memory GB", 1e-9),
    "device_memory": Column("device GB", 1e-9),
    "bytes": Column("GB", 1e-9),
    "files": Column("files", digits=0),
    "load_warm": Column("load warm"),
    "load_cold": Column("load cold"),
    "raw_copy": None,
    "raw_write_2": None,
    "raw_direct_2": None,
    "raw_direct_4": None,
    "raw_read_warm": None,
    "raw_read_cold": None,
    "torn": None,
}

#: The files are `figures.json` and `figures.csv`.
_NAME = "figures"
_COLUMNS = ("state", "target", "row", "figure", "median", "low", "high", "repeats", "note")


@dataclass(frozen=True)
class Spread:
    """The median, minimum and maximum over the repeats."""

    median: float
    low: float
    high: float
    repeats: int


def spread(case: Case, row: str, figure: str) -> Spread | None:
    """A figure of a row; None if no repeat has it."""
    values = [run[figure] for run in case.rows.get(row, ()) if run.get(figure) is not None]
    return Spread(median(values), min(values), max(values), len(values)) if values else None


def fact(case: Case, row: str, name: str) -> Any:
    """A value that is equal in all repeats, such as `state_bytes`; None if no repeat has it."""
    return next((run[name] for run in case.rows.get(row, ()) if name in run), None)


def measured_rows(case: Case) -> list[str]:
    """The rows that have figures, in the order of the table."""
    return [row for row in case.rows if row in ROWS and spread(case, row, "durable") is not None]


def why_not(case: Case, row: str) -> str | None:
    """Why a row has no figures, or fewer than repeats; None if it is complete."""
    for run in case.rows.get(row, ()):
        if ABSENT in run:
            return f"not measured: {run[ABSENT]}"
    failed = [run[ERROR] for run in case.rows.get(row, ()) if ERROR in run]
    if not failed:
        return None
    return f"FAILED in {len(failed)} of {len(case.rows[row])}: {failed[0]}"


def records(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """One flat record per figure, for a CSV file or a data frame."""
    for case in cases:
        for row in case.rows:
            names = FIGURES if row in ROWS else _limits_of(case)
            for figure in names:
                found = spread(case, row, figure)
                if found is not None:
                    yield {"state": case.state, "target": case.target, "row": row, "figure": figure, **asdict(found)}
            reason = why_not(case, row)
            if reason is not None:
                yield {"state": case.state, "target": case.target, "row": row, "figure": "note", "note": reason}


#: Figure -> its name in the report of a sweep, where names of times end with their unit.
_IN_SWEEPS = {figure: name for figure in FIGURES for name in (figure, f"{figure}_s") if name in SWEEP_FIGURES}


def rows_for_sweep(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The rows for `reports.result.write_result`: medians, or the reason why there are none."""
    rows = []
    for case in cases:
        for row in (name for name in case.rows if name in ROWS):
            medians = {name: spread(case, row, figure) for figure, name in _IN_SWEEPS.items()}
            figures = {name: value.median for name, value in medians.items() if value is not None}
            size = spread(case, row, "bytes")
            if size is not None and figures.get("durable_s"):
                figures["gbps"] = size.median / 1e9 / figures["durable_s"]
            rows.append(
                {
                    "name": row,
                    "workload": f"{case.state} on {case.target}",
                    "figures": figures,
                    "reason": None if figures else why_not(case, row) or "not measured yet",
                }
            )
    return rows


def limits_of(case: Case) -> dict[str, Spread]:
    """The hardware limits in seconds, by name."""
    return {name: found for name in _limits_of(case) if (found := spread(case, LIMITS, name)) is not None}


def write_figures(cases: Sequence[Case], folder: Path, about: dict[str, Any]) -> None:
    """Write `figures.json`, which has every run and can be read back, and `figures.csv`, which has the medians.

    Args:
        cases: the figures, possibly of an unfinished run
        folder: the folder to write to
        about: the machine and the settings
    """
    content = {"about": about, "cases": [asdict(case) for case in cases]}
    write_run(folder, _NAME, content, _COLUMNS, records(cases))


def read_figures(folder: str) -> tuple[list[Case], dict[str, Any]]:
    """The figures of an earlier run, and the notes on it.

    Raises:
        CheckpointConfigError: the folder has none
    """

    def of(content: Any) -> tuple[list[Case], dict[str, Any]]:
        return [Case(**case) for case in content["cases"]], content["about"]

    return read_run(folder, _NAME, of, "ckpt-bench")


def _limits_of(case: Case) -> list[str]:
    names = dict.fromkeys(name for run in case.rows.get(LIMITS, ()) for name in run)
    return [name for name in names if name not in (ERROR, ABSENT, "state_bytes")]
