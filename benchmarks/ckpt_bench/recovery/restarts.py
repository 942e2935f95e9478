"""The restarts of a run, and what snapshots cost: their figures and files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ..kept import read_run, write_run
from ..task import ERROR
from .chain import PHASES
from .restart_rows import EMPTY

#: The files are `recovery.json` and `recovery.csv`.
_NAME = "recovery"

#: Figure -> description; seconds if it says nothing else.
FIGURES: Mapping[str, str] = {
    "detect": "from SIGKILL until all processes were gone",
    "respawn": "start of the processes, torchrun and its rendezvous included",
    "import": "torch and this package",
    "group": "process group",
    "build": "model, optimizer, manager",
    "find": "find checkpoints and open the newest",
    "agree": "what is left of the restore: match with the state, wait for other ranks, tidy",
    "verify": "checksums, where they are not verified while copying",
    "copy": "read into the tensors",
    "first_step": "until the first optimizer step has ended",
    "total": "all of these",
    "x_empty": "total over that of the row empty of the same repeat",
    "restore": "find, agree, verify, copy",
    "x_memcpy": "restore over one copy of the states of all ranks in memory, by all cores",
    "repeated": "steps that were done before the kill, and once more after it",
}
#: Figures of `Restarts.lost`.
COSTS = ("lost", "noise", "stall", "staging", "step")


@dataclass
class Restarts:
    """The restarts of a job with some number of ranks.

    Attributes:
        ranks: how many
        rows: row -> repeats, each with its figures by name, or with `ERROR`
        lost: repeats of what snapshots in memory cost; empty: not measured with so many ranks
    """

    ranks: int
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    lost: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Middle:
    """A figure of a row: the median, minimum and maximum over the repeats."""

    median: float
    low: float
    high: float
    repeats: int


def figure(restarts: Restarts, row: str, name: str) -> Middle | None:
    """A figure of `FIGURES`; None if no repeat has it."""
    return _middle(_values(restarts, row, name))


def cost(restarts: Restarts, name: str) -> Middle | None:
    """A figure of `COSTS`; None if no repeat has it."""
    return _middle([run[name] for run in restarts.lost if name in run])


def _values(restarts: Restarts, row: str, name: str) -> list[float]:
    runs = restarts.rows.get(row, [])
    if name == "x_empty":
        pairs = zip(runs, restarts.rows.get(EMPTY, []), strict=False)
        return [run["total"] / beside["total"] for run, beside in pairs if "total" in run and "total" in beside]
    if name == "x_memcpy":
        return [run["restore"] / run["memcpy"] for run in runs if "restore" in run]
    return [float(run[name]) for run in runs if name in run]


def _middle(values: Sequence[float]) -> Middle | None:
    return Middle(median(values), min(values), max(values), len(values)) if values else None


def failures(restarts: Restarts) -> Iterator[str]:
    """One line for each row with failures, and for the costs of snapshots."""
    for name, runs in {**restarts.rows, "snapshots": restarts.lost}.items():
        failed = [run[ERROR] for run in runs if ERROR in run]
        if failed:
            yield f"{name}: FAILED in {len(failed)} of {len(runs)}: {failed[0]}"


def write_restarts(measured: Sequence[Restarts], folder: Path, about: Mapping[str, Any]) -> None:
    """Write every repeat to `recovery.json`, which can be read back, and the medians to `recovery.csv`.

    Args:
        measured: the restarts, also of an unfinished run
        folder: where to write
        about: the machine and the settings
    """
    content = {"about": dict(about), "restarts": [asdict(each) for each in measured]}
    columns = ("ranks", "row", "figure", "median", "low", "high", "repeats")
    write_run(folder, _NAME, content, columns, _records(measured))


def _records(measured: Sequence[Restarts]) -> Iterator[dict[str, Any]]:
    for each in measured:
        found = {(row, name): figure(each, row, name) for row in each.rows for name in FIGURES}
        found |= {("snapshots", name): cost(each, name) for name in COSTS}
        for (row, name), middle in found.items():
            if middle is not None:
                yield {"ranks": each.ranks, "row": row, "figure": name, **asdict(middle)}


def read_restarts(folder: str) -> tuple[list[Restarts], dict[str, Any]]:
    """Read the restarts and the description of an earlier run.

    Raises:
        CheckpointConfigError: the folder has none
    """

    def of(content: Any) -> tuple[list[Restarts], dict[str, Any]]:
        return [Restarts(**each) for each in content["restarts"]], content["about"]

    return read_run(folder, _NAME, of, "ckpt-bench recovery")


def phases_of(restarts: Restarts, row: str) -> dict[str, float]:
    """The median seconds of each phase of a row that has figures, in their order."""
    found = {phase: figure(restarts, row, phase) for phase in PHASES}
    return {phase: middle.median for phase, middle in found.items() if middle is not None}
