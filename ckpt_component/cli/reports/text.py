"""Format text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import printable


def aligned(lines: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Format the lines of a table with aligned columns, two spaces apart.

    Args:
        lines: Cells, equally many in all lines; they are made `printable`.
        left: Indices of left-aligned columns; the others are right-aligned.
    """
    lines = [[*map(printable, line)] for line in lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def duration(seconds: float) -> str:
    """`0.52 ms`, `43 ms`, `1.24 s`, `2.6 min`, `28.8 h`."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.2f} ms"
