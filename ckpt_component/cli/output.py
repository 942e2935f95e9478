"""What the commands print: text of the terminal's width and at most 100 characters, or JSON; colour on a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import repeat
from typing import Any, TextIO

from ..errors import printable
from .text import Table

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
