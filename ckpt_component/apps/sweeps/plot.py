"""The picture of a sweep: stall against durable time, a point for each row, and the bars of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .jobs import Row, differing
from .page import new_figure, page, png_of

PNG, HTML = "sweep.png", "sweep.html"
_POINTS, _BARS = ("#1b6ca8", "#d08c60", "#5a8f5a", "#8d99ae"), "#8d99ae"


def draw(rows: Sequence[Row], text: str, title: str, folder: Path) -> list[Path]:
    """Write the picture and the page; needs matplotlib.

    Args:
        rows: in the order that they are shown in; those without both times are left out.
        text: the table, for the page.
        title: of the page.
        folder: where to.

    Returns:
        The files, none when there is nothing to draw.
    """
    shown = [
        (row, words)
        for row, words in zip(rows, differing(rows), strict=True)
        if "durable_s" in row.figures and row.stall_s is not None
    ]
    if not shown:
        return []
    png = _picture(shown)
    caption = "Left: lower and further left is better; a colour for each workload. Right: the stalls."
    (folder / PNG).write_bytes(png)
    (folder / HTML).write_text(page("Sweep", title, caption, png, [text]), encoding="utf-8")
    return [folder / PNG, folder / HTML]


def _picture(shown: Sequence[tuple[Row, tuple[str, ...]]]) -> bytes:
    figure = new_figure(13, 2.5 + 0.3 * len(shown))
    points, bars = figure.subplots(1, 2)
    workloads = list(dict.fromkeys(row.workload for row, _ in shown))
    for row, _ in shown:
        place = row.figures["durable_s"], row.stall_s
        points.plot(*place, "o", color=_POINTS[workloads.index(row.workload) % len(_POINTS)])
        points.annotate(f" {row.job} {row.name}".rstrip(), place, fontsize=7)
    points.set_xlabel("durable, s", fontsize=8)
    points.set_ylabel("stall, s", fontsize=8)
    points.margins(0.15)
    points.set_ylim(bottom=0)
    labels = [" ".join(filter(None, [row.job, row.name, *words])) for row, words in shown]
    bars.barh(range(len(shown)), [row.stall_s for row, _ in shown], color=_BARS)
    bars.set_yticks(range(len(shown)), [label if len(label) <= 70 else label[:69] + "…" for label in labels])
    bars.set_xlabel("stall, s", fontsize=8)
    bars.invert_yaxis()
    for axis in (points, bars):
        _plain(axis)
    return png_of(figure)


def _plain(axis: Any) -> None:
    axis.tick_params(labelsize=7)
    axis.set_xlim(left=0)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
