"""What commands and reports print: lines, tables, and words for counts and times."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import printable

#: The longer units of time, in seconds.
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


@dataclass(frozen=True)
class Table:
    """A table, for the terminal and for pages.

    Attributes:
        lines: cells, equally many in all lines; the first line is the header
        left: indices of left-aligned columns, from the end if negative; the others are right-aligned
        spared: titles of columns that make way, in this order, where lines would be too long
    """

    lines: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)
    spared: Sequence[str] = ()

    def is_left(self, column: int) -> bool:
        """Whether a column is left-aligned."""
        return column in self.left or column - len(self.lines[0]) in self.left

    def text(self, width: int | None = None) -> list[str]:
        """Its lines, `printable`, with aligned columns that are two spaces apart.

        Args:
            width: the lines are without some of the `spared` columns if they would be longer; None: as long as they are
        """
        columns = {number: self._column(number) for number in range(len(self.lines[0]))}
        for title in filter(self.lines[0].__contains__, self.spared):
            if width is not None and sum(len(cells[0]) + 2 for cells in columns.values()) - 2 > width:
                del columns[self.lines[0].index(title)]
        return ["  ".join(cells).rstrip() for cells in zip(*columns.values(), strict=True)]

    def _column(self, number: int) -> list[str]:
        cells = [printable(line[number]) for line in self.lines]
        widest = max(map(len, cells))
        return [cell.ljust(widest) if self.is_left(number) else cell.rjust(widest) for cell in cells]


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


def duration(seconds: float) -> str:
    """`0.52 ms`, `43 ms`, `1.24 s`, `2.6 min`, `28.8 h`."""
    for length, unit in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.2f} ms"


def shortened(text: str, room: int) -> str:
    """A text, `printable`, that is cut in its middle if it is longer than `room` characters."""
    text = printable(text)
    if len(text) <= room:
        return text
    half = max(room - 1, 2) // 2
    return f"{text[: max(room - 1, 2) - half]}…{text[-half:]}"


def counted(count: int, what: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def wait_text(wait: Mapping[str, Any]) -> str:
    """`has waited 12.0 s for rank 1, at most 48.0 s more`, of a wait as `LongWait.plain` gives it."""
    now = time.time()
    limit = "" if wait["until"] is None else f", at most {duration(max(wait['until'] - now, 0))} more"
    return f"has waited {duration(max(now - wait['since'], 0))} for {wait['for']}{limit}"


def age_text(seconds: float) -> str:
    """An age in one unit: `3 min`."""
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def clock_text(seconds: float) -> str:
    """A point in time, in seconds since 1970, here: `2026-11-25 08:30:00`."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
