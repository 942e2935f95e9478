"""What the commands print: text of the terminal's width and at most 100 characters, or JSON; colour on a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any, TextIO

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


#: Longer lines are hard to read. What is not a terminal, such as a pipe, gets lines of this length.
_WIDEST, _NARROWEST = 100, 40
_STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34}
#: What `styled` adds to a text.
_STYLING = re.compile(r"(\x1b\[(?:[012]|3[1-4])m)")


class Output:
    """Prints the result of a command.

    Args:
        as_json: print JSON instead of text

    Attributes:
        color: whether stdout has colour
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.color = has_color(sys.stdout)

    def result(self, data: Any, lines: Iterable[str] = ()) -> None:
        """Print the result.

        Args:
            data: for `--json`: values of JSON's types, and instances of dataclasses
            lines: the text for people; not taken with `--json`
        """
        if self.as_json:
            print(json.dumps(data, indent=1, allow_nan=False, default=asdict))
        self.show(lines)

    def record(self, data: Any, line: str) -> None:
        """Print a line at once, of a command that goes on: with `--json` the data, as one object."""
        print(json.dumps(data, allow_nan=False, default=asdict) if self.as_json else printable(line), flush=True)

    def show(self, lines: Iterable[str]) -> None:
        """Print text for people, line by line and `printable`, unless the result is JSON."""
        if not self.as_json:
            for line in lines:
                parts = _STYLING.split(line) if self.color else [line]
                print("".join(part if number % 2 else printable(part) for number, part in enumerate(parts)))

    def table(self, table: Table, styles: Iterable[str] = ()) -> Iterator[str]:
        """Lines of a table for `show`: the header bold, and each cut where it would be longer than `width`.

        Args:
            table: the table; its cells have no colour
            styles: of each row, see `style`
        """
        header, *rows = map(fitted, table.text(width()))
        yield self.style(header, "bold")
        yield from map(self.style, rows, styles or repeat(""))

    def style(self, text: str, name: str) -> str:
        """The text as `styled` makes it for stdout."""
        return styled(text, name, sys.stdout)


def width() -> int:
    """How long a line may be: as the terminal, or COLUMNS, is wide; at most 100 characters."""
    return max(min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST), _NARROWEST)


def has_color(stream: TextIO) -> bool:
    """Whether text may be coloured: on a terminal, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def styled(text: str, name: str, stream: TextIO) -> str:
    """A text for a stream, `printable`, and in a style if that has colour: a name of `_STYLES`, or empty."""
    text = printable(text)
    return f"\x1b[{_STYLES[name]}m{text}\x1b[0m" if name and has_color(stream) else text


def fitted(line: str) -> str:
    """A line, `printable`, and cut if it is longer than `width`."""
    line = printable(line)
    return line if len(line) <= width() else f"{line[: width() - 1]}…"


def entry(output: Output, name: str, facts: str, text: str) -> Iterator[str]:
    """Lines of a list in which a name has facts beside it and a text below."""
    first, *others = textwrap.wrap(f"{name} {facts}", width())
    more = first.removeprefix(name)  # where the name alone is longer than a line, all of it is bold
    yield output.style(first[: len(first) - len(more)] or first, "bold") + (
        output.style(more, "dim") if more != first else ""
    )
    yield from (output.style(line, "dim") for line in others)
    yield from textwrap.wrap(text, width(), initial_indent="    ", subsequent_indent="    ")
