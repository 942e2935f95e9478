"""The files of a run: all measurements as JSON, which can be read back, and its points as CSV."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ckpt_component.cli.reports.replaced import replaced, write_csv
from ckpt_component.config.hydra.hydra_errors import HydraConfigError

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
        folder: the folder to write to
        name: name of both files
        content: content of the JSON file
        columns: columns of the CSV file
        records: lines of the CSV file, by column
    """
    with replaced(folder / f"{name}.json") as file:
        file.write(json.dumps(content, indent=1) + "\n")
    write_csv(folder / f"{name}.csv", columns, records)


def read_run(folder: str, name: str, of: Callable[[Any], T], command: str) -> T:
    """Read `name.json` of an earlier run.

    Args:
        folder: folder of the run
        name: name of the file, and of its content in error texts
        of: converts the content
        command: the command that writes such a file

    Raises:
        CheckpointConfigError: the file is missing or invalid
    """
    path = Path(folder).expanduser() / f"{name}.json"
    try:
        return of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HydraConfigError(
            f"results={folder}: no {name} can be read from {path} ({error}); give the folder of a {command} run."
        ) from error
