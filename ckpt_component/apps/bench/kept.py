"""What a run keeps in its folder: all that was measured as JSON, which can be read back, and its points as CSV."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...config.errors import HydraConfigError
from ..sweeps.replaced import replaced, write_csv

T = TypeVar("T")


def write_run(
    folder: Path,
    name: str,
    content: Mapping[str, Any],
    columns: Sequence[str],
    records: Iterable[Mapping[str, Any]],
) -> None:
    """Write `name.json` and `name.csv`.

    Args:
        folder: where to.
        name: of both files.
        content: for the JSON file.
        columns: of the CSV file.
        records: its lines, by column.
    """
    with replaced(folder / f"{name}.json") as file:
        file.write(json.dumps(content, indent=1) + "\n")
    write_csv(folder / f"{name}.csv", columns, records)


def read_run(folder: str, name: str, of: Callable[[Any], T], command: str) -> T:
    """Read `name.json` of an earlier run.

    Args:
        folder: the run's.
        name: of the file; the text of an error calls what is in it so.
        of: converts the content.
        command: what writes such a file.

    Raises:
        CheckpointConfigError: there is none in the folder, or it has something else in it.
    """
    path = Path(folder).expanduser() / f"{name}.json"
    try:
        return of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HydraConfigError(
            f"results={folder}: no {name} can be read from {path} ({error}); give the folder of a {command} run."
        ) from error
