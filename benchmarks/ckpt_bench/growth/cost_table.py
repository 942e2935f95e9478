"""Format the costs as a table: per item, rank or host, and their growth from size to size."""

from __future__ import annotations

from ckpt_component.cli.output import Table

from .costs import COSTS, ONE, Course, errors, is_counted, points

LEGEND = """the median of the repeats, for one item, rank or host
x: over the same at the size before, from the lowest repeats; 1 is linear growth, less is better"""


def render_growth(course: Course) -> str:
    """The table of one axis: a row for every cost, two columns for every size; then what failed."""
    sizes = list(course.runs)
    one = ONE[course.axis]
    lines = [["", *(word for size in sizes for word in (f"{size:,}", "x")), ""]]
    for cost, text in COSTS[course.axis].items():
        by_size = {point.size: point for point in points(course, cost)}
        if not by_size:
            continue
        cells = []
        for size in sizes:
            point = by_size.get(size)
            cells.append("-" if point is None else _amount(cost, point.each))
            cells.append("" if point is None or point.ratio is None else f"{point.ratio:.2f}")
        lines.append([cost, *cells, text])
    rows = Table(lines, left=(0, -1)).text()
    return "\n".join([f"\ncosts for each {one}, by the number of {course.axis}", *rows, *errors(course)])


def _amount(cost: str, value: float) -> str:
    if is_counted(cost):
        return f"{value:,.1f} B" if cost.endswith("bytes") else f"{value:,.1f}"
    return f"{value * 1e6:,.1f} us" if value < 1e-3 else f"{value * 1e3:,.2f} ms"
