"""Small files that are replaced atomically, so that a concurrent reader never sees half of one."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


@contextmanager
def replaced(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """A file to write to, which takes the place of `path` when the `with` block ends without an exception.

    Args:
        path: in a folder that exists.
        newline: as for `open`.
    """
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8", newline=newline) as file:
        yield file
    os.replace(part, path)


def write_csv(path: Path, columns: Sequence[str], records: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file.

    Args:
        path: as for `replaced`.
        columns: its header, in order.
        records: a line each, by column; what is left out, or None, stays empty.
    """
    with replaced(path, newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(records)
