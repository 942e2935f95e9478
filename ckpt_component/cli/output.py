"""What the commands print: text of the terminal's width and at most 100 characters, or JSON; colour on a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from ..errors import printable
from .reports.text import aligned

#: Longer lines are hard to read. What is not a terminal, such as a pipe, gets lines of this length.
_WIDEST, _NARROWEST = 100, 40
_STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34}
#: What `styled` adds to a text.
_STYLING = re.compile(r"(\x1b\[(?:[012]|3[1-4])m)")
_AGES = ((86400, "d"), (3600, "h"), (60, "min"))


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

    def show(self, lines: Iterable[str]) -> None:
        """Print text for people, line by line and `printable`, unless the result is JSON."""
        if not self.as_json:
            for line in lines:
                parts = _STYLING.split(line) if self.color else [line]
                print("".join(part if number % 2 else printable(part) for number, part in enumerate(parts)))

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
    """A text for a stream, `printable` and in a style (bold, dim, red, green, yellow, blue), if it has colour."""
    text = printable(text)
    return f"\x1b[{_STYLES[name]}m{text}\x1b[0m" if has_color(stream) else text


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Iterator[str]:
    """Lines of a table; the last column is cut where a line would be longer than `width`.

    Args:
        header: titles of the columns
        rows: cells, without colour
        right: numbers of the columns to align right
    """
    left = [number for number in range(len(header)) if number not in right]
    yield from map(fitted, aligned([header, *rows], left))


def fitted(line: str) -> str:
    """A line, `printable`, and cut if it is longer than `width`."""
    line = printable(line)
    return line if len(line) <= width() else f"{line[: width() - 1]}…"


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


def age_text(seconds: float) -> str:
    """An age in one unit: `3 min`."""
    for length, unit in _AGES:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def entry(output: Output, name: str, facts: str, text: str) -> Iterator[str]:
    """Lines of a list in which a name has facts beside it and a text below."""
    first, *others = textwrap.wrap(f"{name} {facts}", width())
    more = first.removeprefix(name)  # where the name alone is longer than a line, all of it is bold
    yield output.style(first[: len(first) - len(more)] or first, "bold") + (
        output.style(more, "dim") if more != first else ""
    )
    yield from (output.style(line, "dim") for line in others)
    yield from textwrap.wrap(text, width(), initial_indent="    ", subsequent_indent="    ")
