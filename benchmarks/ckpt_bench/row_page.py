"""What the rows of a run come to: their tables, and a picture of their figures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ckpt_component.cli.reports.page import new_figure, without_frame

from .measure.row_kinds import ROWS
from .presentation import Presentation
from .row_figures import Spread, fact, limits_of, measured_rows, spread
from .row_table import LEGEND, render
from .runs import Case
from .verdicts import Verdict

_COLOURS = {"ours": "#1b6ca8", "torch": "#8d99ae", "peers": "#d08c60"}
#: Title of a panel, its figure, and the limit to draw in it.
_PANELS = (
    ("stall, s", "stall", "memcpy"),
    ("durable, s", "durable", "direct_1"),
    ("training time lost, s", "lost", None),
    ("load, warm, s", "load_warm", "read_crc32_warm"),
    ("peak memory, GB", "memory", None),
)


def rows_shown(cases: Sequence[Case], verdicts: Sequence[Verdict]) -> Presentation:
    """What the rows of a run come to; cases without a measured row are not in the picture."""
    drawn = [case for case in cases if measured_rows(case)]
    return Presentation(
        "ckpt-bench",
        "figures",
        [render(case) for case in cases],
        LEGEND,
        verdicts,
        "Bars are medians, black lines go from the lowest repeat to the highest, dotted lines are limits.",
        partial(_picture, drawn) if drawn else None,
    )


def _picture(cases: Sequence[Case]) -> Any:
    heights = [1.2 + 0.28 * len(measured_rows(case)) for case in cases]
    figure = new_figure(4 * len(_PANELS) + 2, sum(heights))
    grid = figure.subplots(len(cases), len(_PANELS), squeeze=False, gridspec_kw={"height_ratios": heights})
    for case, axes in zip(cases, grid, strict=True):
        for number, (axis, (title, name, limit)) in enumerate(zip(axes, _PANELS, strict=True)):
            _panel(axis, case, name, limits_of(case).get(limit or ""), limit)
            axis.set_title(title if number else f"{_title(case)}\n{title}", fontsize=9)
            if number:
                axis.set_yticklabels([])
    return figure


def _panel(axis: Any, case: Case, name: str, limit: Spread | None, limit_name: str | None) -> None:
    factor = 1e-9 if name == "memory" else 1.0
    rows = measured_rows(case)
    for place, row in enumerate(rows):
        found = spread(case, row, name)
        if found is None:
            continue
        middle, low, high = (value * factor for value in (found.median, found.low, found.high))
        axis.barh(place, middle, color=_COLOURS[ROWS[row].family])
        axis.plot([low, high], [place, place], color="black", linewidth=1)
        axis.annotate(f" {middle:.3g}", (max(middle, high, 0), place), va="center", fontsize=7)
    if limit is not None:
        axis.axvline(limit.median, color="#555555", linestyle=":", linewidth=1)
        axis.annotate(limit_name, (limit.median, -0.6), fontsize=6, color="#555555")
    axis.set_yticks(range(len(rows)), rows, fontsize=7)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    without_frame(axis)


def _title(case: Case) -> str:
    nbytes = fact(case, measured_rows(case)[0], "state_bytes")
    return f"{case.state} on {case.target}, {nbytes / 1e9:.2f} GB"
