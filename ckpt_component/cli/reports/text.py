"""What reports are made of, lines and tables, and their text for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...errors import printable


@dataclass(frozen=True)
class Table:
    """A table of a report.

    Attributes:
        lines: cells, equally many in all lines; the first line is the header
        left: indices of left-aligned columns; the others are right-aligned
        spared: titles of columns that make way, in this order, where lines would be too long
    """

    lines: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)
    spared: Sequence[str] = ()

    def text(self, width: int) -> list[str]:
        """Its lines, without some of the `spared` columns if they would be longer than `width`."""
        lines = aligned(self.lines, self.left)
        for column in self.spared if max(map(len, lines)) > width else ():
            place = self.lines[0].index(column)
            fewer = [[*line[:place], *line[place + 1 :]] for line in self.lines]
            left = [index - (index > place) for index in self.left]
            return Table(fewer, left, self.spared[self.spared.index(column) + 1 :]).text(width)
        return lines


#: What a report consists of: a line, empty between its parts, or a table.
Element = str | Table


def lines_of(blocks: Iterable[Element], width: int) -> Iterator[str]:
    """The text of a report for the terminal.

    Args:
        blocks: its lines and tables
        width: where lines are wrapped, in characters
    """
    for block in blocks:
        if isinstance(block, Table):
            yield from block.text(width)
        else:
            yield from textwrap.wrap(printable(block), width, subsequent_indent="  ") or [""]


def aligned(lines: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Format the lines of a table with aligned columns, two spaces apart.

    Args:
        lines: cells, equally many in all lines; they are made `printable`
        left: indices of left-aligned columns; the others are right-aligned
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
