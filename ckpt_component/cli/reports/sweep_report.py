"""The report of a sweep: a table sorted by stall, `sweep.csv`, and with the extra `plot` a picture and a page."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.hydra.hydra_job import is_multirun
from ..output import Element, Table, lines_of, width
from .page import new_figure, without_frame, write_page, write_report
from .replaced import write_csv
from .result import Row, differing, read_jobs, shared_disks, shared_text, spans_of

if TYPE_CHECKING:
    pass

from .sweep_figures import FIGURES

logger = logging.getLogger(__name__)


#: The files are `sweep.csv`, `sweep.png` and `sweep.html`.
_NAME = "sweep"
_CSV_COLUMNS = [
    *("job", "row", "workload", "differs", "status", "pareto", "shared_disk"),
    *FIGURES,
    "returned",
    *("reason", "overrides"),
]
#: Columns that make way in this order where lines would be too long; `sweep.csv` has them.
_SPARED = ("step x", "GB/s", "step", "staged")
#: With more rows than this, the picture says of the Pareto rows alone what differs.
_NAMED = 12
_COLOURS = ("#1b6ca8", "#d08c60", "#5a8f5a", "#8d99ae")


def report(folder: Path, say: Callable[[str], None] = print, out: Path | None = None) -> None:
    """Report a sweep.

    Args:
        folder: folder of a sweep, of one job, or of several jobs
        say: function that prints the text
        out: folder for the files; None: `folder`

    Raises:
        CheckpointConfigError: the folder has no jobs, or the files cannot be written
    """
    rows = read_rows(folder)
    say(table(rows))
    for line in how_to_continue(rows, folder):
        say(line)
    write_report(partial(write_files, rows, folder), folder if out is None else out, say)


def read_rows(folder: Path) -> list[Row]:
    """The rows of a sweep in the order of the report: by workload, the least stall first.

    Args:
        folder: folder of a sweep, of one job, or of several jobs

    Raises:
        CheckpointConfigError: the folder has no jobs
    """
    return sorted(read_jobs(folder), key=lambda row: (row.workload, row.stall_s is None, row.stall_s or 0.0))


def write_files(rows: Sequence[Row], folder: Path, out: Path) -> list[Path]:
    """Write `sweep.csv`, and if matplotlib is installed the picture and the page.

    Args:
        rows: the rows, from `read_rows`
        folder: folder of the sweep, which the page names
        out: where to

    Raises:
        OSError: a file cannot be written
    """
    base = out / _NAME
    write_csv(base.with_suffix(".csv"), _CSV_COLUMNS, records(rows))
    files = [base.with_suffix(".csv")]
    complete = [row for row in rows if _times(row) is not None]
    if complete:
        caption = "Lower and further left is better; a colour for each workload."
        files += write_page(base, partial(_picture, complete), "Sweep", str(folder), caption, _blocks(rows))
    return files


def table(rows: Sequence[Row]) -> str:
    """The report as text: a table per workload, and a legend.

    Args:
        rows: the rows, in the order in which to show them
    """
    return "\n".join(lines_of(_blocks(rows), width()))


def how_to_continue(rows: Sequence[Row], folder: Path) -> list[str]:
    """A line on how to continue the sweep of a folder, if a job of it was interrupted."""
    interrupted = sum(row.is_interrupted for row in rows)
    if not interrupted or not is_multirun(folder):
        return []
    text = "jobs did not end; the command of the sweep continues it, with"
    return [f"{interrupted} of {len(rows)} {text} hydra.sweep.dir={folder}"]


def costs(row: Row) -> str:
    """What the saves of a single job have cost: a figure a line, and what became of the job if that is not all."""
    figures = [(figure, figure.text(row.figures[key])) for key, figure in FIGURES.items() if key in row.figures]
    lines = [[text, f"{figure.column}: {figure.meaning}"] for figure, text in figures]
    return "\n".join(lines_of([Table(lines, left=(1,))] if lines else [row.outcome], width()))


def _blocks(rows: Sequence[Row]) -> Iterator[Element]:
    pareto, differences = best(rows), differing(rows)
    figures = {key: figure for key, figure in FIGURES.items() if any(key in row.figures for row in rows)}
    # What a job returned is most often one of its figures.
    results = any(row.returned is not None and row.returned not in row.figures.values() for row in rows)
    header = ["", "job", *(figure.column for figure in figures.values()), *(["returned"] if results else [])]
    header += ["what differs", "outcome"]
    by_workload: dict[str, list[list[str]]] = {}
    for place, (row, words) in enumerate(zip(rows, differences, strict=True)):
        cells = [figure.text(row.figures[key]) if key in row.figures else "-" for key, figure in figures.items()]
        cells += [_returned(row.returned)] if results else []
        mark, name = "*" if place in pareto else "", f"{row.job} {row.name}".strip()
        by_workload.setdefault(row.workload, []).append([mark, name, *cells, " ".join(words), row.outcome])
    for workload, lines in by_workload.items():
        if len(by_workload) > 1:
            yield f"{workload or 'as configured'}:"
        yield Table([header, *lines], left=(0, 1, -2, -1), spared=_SPARED)
        yield ""
    stall = FIGURES["stall_s" if "stall_s" in figures else "first_stall_s"].column
    yield f"rows with figures: {sum(bool(row.figures) for row in rows)} of {len(rows)}, sorted by {stall}"
    yield "; ".join(f"{figure.column}: {figure.meaning}" for figure in figures.values())
    yield f"*: Pareto, no row of the same workload has both less {stall} and less durable time"
    for disk, jobs in shared_disks(spans_of(rows)).items():
        yield shared_text(disk, jobs)


def _returned(value: Any) -> str:
    """What a job returned, in the width of a column."""
    if isinstance(value, list):
        return ", ".join(map(_returned, value))
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def best(rows: Sequence[Row]) -> set[int]:
    """Indices of the Pareto rows: no row of the same workload is as good in both times and better in one."""
    points = {place: (row.workload, *times) for place, row in enumerate(rows) if (times := _times(row)) is not None}
    return {
        place
        for place, (workload, stall, durable) in points.items()
        if not any(
            other != points[place] and other[0] == workload and other[1] <= stall and other[2] <= durable
            for other in points.values()
        )
    }


def _times(row: Row) -> tuple[float, float] | None:
    stall, durable = row.stall_s, row.figures.get("durable_s")
    return None if stall is None or durable is None else (stall, durable)


def _picture(rows: Sequence[Row]) -> Any:
    """Plot stall against durable time, one point per row, and a line through the Pareto rows of each workload."""
    figure = new_figure(9, 6)
    axis = figure.subplots()
    pareto, differences = best(rows), differing(rows)
    workloads = list(dict.fromkeys(row.workload for row in rows))
    middle = max(row.figures["durable_s"] for row in rows) / 2
    for place, (row, words) in enumerate(zip(rows, differences, strict=True)):
        at = row.figures["durable_s"], row.stall_s
        colour = _COLOURS[workloads.index(row.workload) % len(_COLOURS)]
        # A point at zero lies on an axis, and the text of one at the right goes to the left, or both would be cut off.
        axis.plot(*at, "o", color=colour, clip_on=False, alpha=1 if place in pareto else 0.4)
        named = place in pareto or len(rows) <= _NAMED
        label = " ".join(filter(None, [row.job, row.name, *(_short(word) for word in words if named)]))
        side = "left" if at[0] < middle else "right"
        offset = (5 if side == "left" else -5, 3)
        slope = {"rotation": 20 if side == "left" else -20, "rotation_mode": "anchor"}  # neighbours do not overlap
        axis.annotate(label, at, offset, textcoords="offset points", ha=side, fontsize=7, **slope)
    for workload in workloads:
        colour = _COLOURS[workloads.index(workload) % len(_COLOURS)]
        front = sorted(
            (rows[at].figures["durable_s"], rows[at].stall_s) for at in pareto if rows[at].workload == workload
        )
        name = workload or "as configured"
        axis.plot(*zip(*front, strict=True), "--", linewidth=0.8, color=colour, label=name)
    if len(workloads) > 1:
        axis.legend(fontsize=7, frameon=False)
    axis.set_title("Saves of a sweep: on the line, no job has less of both", fontsize=9, loc="left")
    axis.set_xlabel("durable: until committed, or synced (s)", fontsize=8)
    axis.set_ylabel("stall: how long a save kept training waiting (s)", fontsize=8)
    axis.margins(0.15)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    without_frame(axis)
    return figure


def _short(override: str) -> str:
    """The end of an override, as `workers=4` and `stager=pinned`."""
    key, _, value = override.partition("=")
    return f"{key.replace('/', '.').rpartition('.')[2]}={value}"


def records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain data, for the CSV file and for JSON."""
    pareto, differences = best(rows), differing(rows)
    shared = shared_disks(spans_of(rows))
    return [
        {
            "job": row.job,
            "row": row.name,
            "workload": row.workload,
            "differs": " ".join(words),
            "status": row.status,
            "reason": row.reason,
            "pareto": int(place in pareto),
            "shared_disk": " ".join(disk for disk, jobs in shared.items() if row.job in jobs),
            **row.figures,
            "returned": row.returned,
            "overrides": " ".join(row.overrides),
        }
        for place, (row, words) in enumerate(zip(rows, differences, strict=True))
    ]
