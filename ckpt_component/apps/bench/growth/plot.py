"""A picture of the growth, and a page that needs nothing but itself. Needs the extra `plot`."""

from __future__ import annotations

import base64
import html
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..verdicts import Verdict
from .figures import COSTS, ONE, Course, is_counted, points
from .table import LEGEND, render_growth

PNG, HTML = "growth.png", "growth.html"


def draw_growth(
    courses: Sequence[Course], verdicts: Sequence[Verdict], about: Mapping[str, Any], folder: Path
) -> list[Path]:
    """Write the picture and the page.

    Args:
        courses: the costs.
        verdicts: for the page.
        about: the machine and the settings, for the page.
        folder: where to.

    Returns:
        The files, none when nothing was measured.
    """
    panels = [
        (course, counted, costs)
        for course in courses
        for counted in (False, True)
        if (costs := [c for c in COSTS[course.axis] if is_counted(c) is counted and points(course, c)])
    ]
    if not panels:
        return []
    # It tells at length of the fonts that it looks for.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    png = _picture(panels)
    (folder / PNG).write_bytes(png)
    (folder / HTML).write_text(_page(png, courses, verdicts, about), encoding="utf-8")
    return [folder / PNG, folder / HTML]


def _picture(panels: Sequence[tuple[Course, bool, list[str]]]) -> bytes:
    # Not pyplot: it keeps figures and picks a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found,unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    figure = Figure(figsize=(11, 4.2 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
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
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=110)
    return written.getvalue()


def _page(png: bytes, courses: Sequence[Course], verdicts: Sequence[Verdict], about: Mapping[str, Any]) -> str:
    image = base64.b64encode(png).decode()
    blocks = [html.escape(render_growth(course).strip()) for course in courses]
    blocks.append(html.escape("\n".join(verdict.line() for verdict in verdicts)))
    machine = html.escape(", ".join(f"{name}: {value}" for name, value in about.items()))
    tables = "\n".join(f"<pre>{block}</pre>" for block in blocks)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>ckpt-bench growth</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 100rem; padding: 0 1rem; color: #222 }}
img {{ max-width: 100% }} pre {{ overflow-x: auto; background: #f6f6f4; padding: 1rem; font-size: 12px }}
</style></head><body>
<h1>ckpt-bench growth</h1><p>{machine}</p>
<img alt="cost of one item and of one rank, by their number" src="data:image/png;base64,{image}">
<pre>{html.escape(LEGEND)}</pre>
{tables}
</body></html>
"""
