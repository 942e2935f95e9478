"""What `ckpt-bench hosts` measures, in turn, and its files."""

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

#: The files are `hosts.json` and `hosts.csv`.
_NAME = "hosts"
COPIES = "copies"


def reads(hosts: int) -> str:
    """The row of so many hosts that read together."""
    return f"read once, {hosts} hosts"


def measure_hosts(
    request: BenchRequest, parent: tuple[Path, str], about: Mapping[str, Any], folder: Path, say: Callable[[str], None]
) -> dict[str, Run]:
    """Measure copies, and reads of every number of hosts, each in a fresh process.

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
    wanted: dict[str, tuple[str, dict[str, Any]]] = {
        COPIES: ("hosts.copies:measure_copies", {"pairs": bench.pairs, "step_seconds": bench.step_seconds})
    }
    for hosts in request.sizes["hosts"]:
        arguments = {"hosts": hosts, "rate": bench.storage_rate, "loads": bench.saves}
        wanted[reads(hosts)] = "hosts.shared_reads:measure_reads", arguments
    measured = dict[str, Run]()
    with place(parent[0], f"{parent[1]}=") as base:
        for row, (call, arguments) in wanted.items():
            say(row)
            log = folder / f"{row.replace(', ', '-').replace(' ', '-')}.log"
            measured[row] = measure_in_child(call, {"state": state, **arguments}, base, log, bench.row_timeout)
            write_hosts(measured, folder, about)
            if ERROR in measured[row]:
                say(f"{row} FAILED: {measured[row][ERROR]}")
    return measured


def ratios(run: Run, above: str, below: str) -> list[float]:
    """One figure of a row over another one, turn by turn; a figure that is no list is the same in every turn."""
    if above not in run or below not in run:
        return []
    others = run[below] if isinstance(run[below], list) else [run[below]] * len(run[above])
    return [one / other for one, other in zip(run[above], others, strict=True)]


def write_hosts(measured: Mapping[str, Run], folder: Path, about: Mapping[str, Any]) -> None:
    """Write every turn to `hosts.json`, which can be read back, and the medians to `hosts.csv`."""
    content = {"about": dict(about), "rows": measured}
    write_run(folder, _NAME, content, ("row", "figure", "median", "low", "high", "turns"), _records(measured))


def _records(measured: Mapping[str, Run]) -> Iterator[dict[str, Any]]:
    for row, run in measured.items():
        for figure, values in run.items():
            if isinstance(values, list):
                spread = {"median": median(values), "low": min(values), "high": max(values), "turns": len(values)}
                yield {"row": row, "figure": figure, **spread}


def read_hosts(folder: str) -> tuple[dict[str, Run], dict[str, Any]]:
    """Read the figures and the description of an earlier run.

    Raises:
        CheckpointConfigError: the folder has none
    """
    return read_run(folder, _NAME, lambda content: (content["rows"], content["about"]), "ckpt-bench hosts")
