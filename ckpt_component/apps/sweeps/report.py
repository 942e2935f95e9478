"""The report of a sweep: a table sorted by stall, `sweep.csv`, and with the extra `plot` a picture and a page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...config.errors import HydraConfigError
from .figures import FIGURES, Figure
from .jobs import Row, differing, read_jobs
from .page import NO_PICTURE, can_plot
from .plot import draw
from .replaced import write_csv
from .text import aligned

CSV = "sweep.csv"


def report(folder: Path, say: Callable[[str], None] = print, out: Path | None = None) -> None:
    """Report a sweep.

    Args:
        folder: of the sweep, of one job, or of several jobs.
        say: gets the text.
        out: where the files go; None: into `folder`.

    Raises:
        CheckpointConfigError: the folder has no jobs, or the files cannot be written.
    """
    rows = sorted(read_jobs(folder), key=_order)
    text = table(rows)
    say(text)
    where = folder if out is None else out
    try:
        where.mkdir(parents=True, exist_ok=True)
        files = [_write_csv(rows, where)]
        if can_plot():
            files += draw(rows, text, str(folder), where)
        else:
            say(NO_PICTURE)
    except OSError as error:
        raise HydraConfigError(
            f"The report cannot be written into {where} ({error.strerror}); type --out=FOLDER to have it elsewhere."
        ) from error
    say(f"in {where}: {', '.join(path.name for path in files)}")


def table(rows: Sequence[Row]) -> str:
    """The rows as text, a block for each workload, with a legend.

    Args:
        rows: in the order that they are shown in.
    """
    marked, changed = best(rows), differing(rows)
    shown = {key: figure for key, figure in FIGURES.items() if any(key in row.figures for row in rows)}
    heads = ["", "job", *(figure.column for figure in shown.values()), "what differs", "outcome"]
    lines = [heads]
    for place, (row, words) in enumerate(zip(rows, changed, strict=True)):
        cells = [figure.text(row.figures[key]) if key in row.figures else "-" for key, figure in shown.items()]
        name = f"{row.job} {row.name}".strip()
        lines.append(["*" if place in marked else "", name, *cells, " ".join(words), row.outcome])
    if not any(changed):
        lines = [[*line[:-2], line[-1]] for line in lines]
    left = [0, 1, *range(2 + len(shown), len(lines[0]))]
    head, *body = aligned(lines, left)
    text, workloads = list[str](), list(dict.fromkeys(row.workload for row in rows))
    for workload in workloads:
        if len(workloads) > 1:
            text.append(f"{workload or 'as configured'}:")
        text += [head, *(line for row, line in zip(rows, body, strict=True) if row.workload == workload), ""]
    return "\n".join([*text, *_legend(rows, list(shown.values()))])


def best(rows: Sequence[Row]) -> set[int]:
    """The places of the Pareto rows: none of the same workload is as good in both times and better in one."""
    points = {place: point for place, row in enumerate(rows) if (point := _point(row)) is not None}

    def beaten(place: int) -> bool:
        mine = points[place]
        return any(
            rows[other].workload == rows[place].workload
            and point != mine
            and point[0] <= mine[0]
            and point[1] <= mine[1]
            for other, point in points.items()
        )

    return {place for place in points if not beaten(place)}


def _point(row: Row) -> tuple[float, float] | None:
    stall, durable = row.stall_s, row.figures.get("durable_s")
    return None if stall is None or durable is None else (stall, durable)


def _order(row: Row) -> tuple[str, bool, float]:
    return row.workload, row.stall_s is None, row.stall_s or 0.0


def _legend(rows: Sequence[Row], shown: Sequence[Figure]) -> list[str]:
    measured = sum(bool(row.figures) for row in rows)
    lines = [f"{measured} of {len(rows)} {'row has' if len(rows) == 1 else 'rows have'} figures, sorted by stall"]
    if measured:
        lines += textwrap.wrap("; ".join(f"{figure.column}: {figure.meaning}" for figure in shown), 120)
        kept = " of the same workload" if len({row.workload for row in rows}) > 1 else ""
        lines.append(f"*: Pareto, no row{kept} has both less stall and less durable time")
    return lines


def _write_csv(rows: Sequence[Row], folder: Path) -> Path:
    marked, changed = best(rows), differing(rows)
    records: list[dict[str, Any]] = [
        {
            "job": row.job,
            "row": row.name,
            "workload": row.workload,
            "differs": " ".join(words),
            "status": row.status,
            "reason": row.reason,
            "pareto": int(place in marked),
            **row.figures,
            "overrides": " ".join(row.overrides),
        }
        for place, (row, words) in enumerate(zip(rows, changed, strict=True))
    ]
    columns = ["job", "row", "workload", "differs", "status", "pareto", *FIGURES, "reason", "overrides"]
    write_csv(folder / CSV, columns, records)
    return folder / CSV
