"""`ckpt-bench growth`: measure all sizes, show the costs, and judge whether any grows faster than linearly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckpt_component.cli.reports.page import NO_PICTURE, can_plot

from ..place import place
from ..schema import BenchRequest
from .cost_page import draw_growth
from .cost_table import LEGEND, render_growth
from .costs import Course, write_growth
from .judge import judge_growth
from .sizes import measure_growth


def measure_courses(
    request: BenchRequest, parent: tuple[Path, str], about: Mapping[str, Any], folder: Path, say: Callable[[str], None]
) -> list[Course]:
    """Measure the sizes that the config selects.

    Args:
        request: the config
        parent: folder for the checkpoints, and the key that set it
        about: the machine and the settings
        folder: where the costs are written after every process
        say: called with each line of progress
    """
    bench = request.bench
    with place(parent[0], f"{parent[1]}=") as base:
        return measure_growth(
            request.sizes,
            base,
            repeats=bench.repeats,
            saves=bench.saves,
            timeout=bench.row_timeout,
            logs=folder,
            say=say,
            tell=lambda found: write_growth(found, folder, about),
        )


def show_courses(
    courses: list[Course], about: Mapping[str, Any], folder: Path, say: Callable[[str], None]
) -> str | None:
    """Print tables and verdicts, and draw the costs. Return a text about failures, or None."""
    print("\n".join(render_growth(course) for course in courses))
    verdicts = judge_growth(courses)
    print(f"\n{LEGEND}\n\n" + "\n".join(verdict.line() for verdict in verdicts))
    if can_plot():
        draw_growth(courses, verdicts, about, folder)
    else:
        say(NO_PICTURE)
    say(f"figures are in {folder}")
    passed, failed = (sum(verdict.holds is outcome for verdict in verdicts) for outcome in (True, False))
    print(f"{passed} hold, {failed} FAIL, {len(verdicts) - passed - failed} not measured")
    if not any("error" not in run for course in courses for runs in course.runs.values() for run in runs):
        return "Nothing was measured; the reasons are above."
    return f"{failed} cost{'s' * (failed > 1)} grew faster than linearly; see FAIL above." if failed else None
