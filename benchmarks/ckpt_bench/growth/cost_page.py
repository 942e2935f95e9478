"""What the costs of a run come to: their tables, verdicts, and a picture of their growth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ckpt_component.cli.reports.page import new_figure

from ..presentation import Presentation
from .cost_table import LEGEND, render_growth
from .costs import COSTS, ONE, Course, is_counted, points
from .judge import judge_growth


def costs_shown(courses: Sequence[Course]) -> Presentation:
    """What the costs of a run come to, judged."""
    panels = [
        (course, counted, costs)
        for course in courses
        for counted in (False, True)
        if (costs := [c for c in COSTS[course.axis] if is_counted(c) is counted and points(course, c)])
    ]
    return Presentation(
        "ckpt-bench growth",
        "growth",
        [render_growth(course) for course in courses],
        LEGEND,
        judge_growth(courses),
        "The cost of one item and of one rank, by their number.",
        partial(_picture, panels) if panels else None,
    )


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
