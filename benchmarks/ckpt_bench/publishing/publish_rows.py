"""What `ckpt-bench publish` measures, in turn, and its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from ..child import Run, measure_in_child
from ..kept import read_run, write_run
from ..place import place
from ..schema import BenchRequest
from ..task import ERROR
from .row_calls import PUBLISH_ROWS, TRAINING

#: The files are `publish.json` and `publish.csv`.
_NAME = "publish"


def measure_publishing(
    request: BenchRequest, parent: tuple[Path, str], about: Mapping[str, Any], folder: Path, say: Callable[[str], None]
) -> dict[str, Run]:
    """Measure versions, training beside publishing, and receivers, each in a fresh process.

    Args:
        request: the config
        parent: folder for the checkpoints, and the key that set it
        about: the machine and the settings
        folder: where the figures are written after every process, so that a run that is stopped leaves them; and what a
            failed process printed
        say: called with each line of progress

    Returns:
        By row, its figures, which are lists of its turns.
    """
    bench, (state,) = request.bench, request.states
    loop = {"loop_threads": bench.loop_threads, "step_seconds": bench.step_seconds}
    measured = dict[str, Run]()
    with place(parent[0], f"{parent[1]}=") as base:
        for row in request.rows:
            say(row)
            arguments = {"state": state, "pairs": bench.pairs, **(loop if row == TRAINING else {})}
            measured[row] = measure_in_child(
                PUBLISH_ROWS[row], arguments, base, folder / f"{row}.log", bench.row_timeout
            )
            write_publishing(measured, folder, about)
            if ERROR in measured[row]:
                say(f"{row} FAILED: {measured[row][ERROR]}")
    return measured


def ratios(run: Run, above: str, below: str) -> list[float]:
    """One figure of a row over another one, turn by turn."""
    return [one / other for one, other in zip(run.get(above, []), run.get(below, []), strict=False)]


def write_publishing(measured: Mapping[str, Run], folder: Path, about: Mapping[str, Any]) -> None:
    """Write every turn to `publish.json`, which can be read back, and the medians to `publish.csv`."""
    content = {"about": dict(about), "rows": measured}
    write_run(folder, _NAME, content, ("row", "figure", "median", "low", "high", "turns"), _records(measured))


def _records(measured: Mapping[str, Run]) -> Iterator[dict[str, Any]]:
    for row, run in measured.items():
        for figure, values in run.items():
            if isinstance(values, list) and values:
                spread = {"median": median(values), "low": min(values), "high": max(values), "turns": len(values)}
                yield {"row": row, "figure": figure, **spread}


def read_publishing(folder: str) -> tuple[dict[str, Run], dict[str, Any]]:
    """Read the figures and the description of an earlier run.

    Raises:
        CheckpointConfigError: the folder has none
    """
    return read_run(folder, _NAME, lambda content: (content["rows"], content["about"]), "ckpt-bench publish")
