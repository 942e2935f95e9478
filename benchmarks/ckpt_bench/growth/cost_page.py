"""Draw the growth, and write a self-contained HTML page. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_component.cli.reports.page import new_figure, write_page

from ..verdicts import Verdict
from .cost_table import LEGEND, render_growth
from .costs import COSTS, ONE, Course, is_counted, points

#: The files are `growth.png` and `growth.html`.
_NAME = "growth"


def draw_growth(
    courses: Sequence[Course], verdicts: Sequence[Verdict], about: Mapping[str, Any], folder: Path
) -> list[Path]:
    """Write the picture and the page.

    Args:
        courses: the costs
        verdicts: for the page
        about: the machine and the settings, for the page
        folder: where to write

    Returns:
        The files; empty if nothing was measured.
    """
    panels = [
        (course, counted, costs)
        for course in courses
        for counted in (False, True)
        if (costs := [c for c in COSTS[course.axis] if is_counted(c) is counted and points(course, c)])
    ]
    if not panels:
        return []
    blocks = [LEGEND, *(render_growth(course).strip() for course in courses)]
    blocks.append("\n".join(verdict.line() for verdict in verdicts))
    machine = ", ".join(f"{name}: {value}" for name, value in about.items())
    caption = "The cost of one item and of one rank, by their number."
    return write_page(folder / _NAME, _picture(panels), "ckpt-bench growth", machine, caption, blocks)


def _picture(panels: Sequence[tuple[Course, bool, list[str]]]) -> Any:
    figure = new_figure(11, 4.2 * len(panels))
    for axis, (course, counted, costs) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        for number, cost in enumerate(costs):
            found = [point for point in points(course, cost) if point.each > 0]
            scale = 1.0 if counted else 1e6
            style = ("-", "--", ":")[number // 10 % 3]
            axis.plot(
                [p.size for p in found], [p.each * scale for p in found], style, marker="o", markersize=3, label=cost
            )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(course.axis)
        axis.set_title(f"{'bytes and calls' if counted else 'us'} for each {ONE[course.axis]}; flat is linear growth")
        axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
