"""The costs measured at growing sizes, in total and per item or rank, and the files they are written to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..kept import read_run, write_run

#: The files are `growth.json` and `growth.csv`.
_NAME = "growth"

#: Axis -> cost -> what it is. Those that end in `bytes`, `messages` and `looks` are counted, the others are seconds.
COSTS: Mapping[str, Mapping[str, str]] = {
    "items": {
        "survey": "first save: find the tensors, note their structure",
        "layout": "first save: give every byte its place",
        "templates": "first save: the bytes around as many different shapes as items",
        "describe": "first save: describe the places for readers",
        "index": "first save: .metadata",
        "first_stall": "first save: the whole call",
        "first_save": "first save: until it is committed",
        "walk": "every save: find the tensors",
        "check": "every save: compare the structure",
        "stage": "every save: start the copies, and make them",
        "stall": "every save: the whole call",
        "save": "every save: until it is committed",
        "first_load": "the first load",
        "load": "every load",
        "catalog_bytes": "sent to rank 0 at the first save",
        "metadata_bytes": "size of .metadata",
        "integrity_bytes": "size of integrity-0.json",
        "manifest_bytes": "size of manifest.json",
    },
    "ranks": {
        "seconds": "every save: from its call to its commit",
        "cpu": "every save: CPU of all ranks",
        "leader_cpu": "every save: CPU of rank 0, the store's server included",
        "messages": "every save: calls that change the store",
        "leader_messages": "every save: such calls of rank 0",
        "looks": "every save: calls that ask the store",
        "collected_bytes": "every save: read by rank 0 from the store, votes above all",
        "heard_bytes": "every save: read by all others",
        "first_seconds": "first save: from its call to its commit",
        "first_cpu": "first save: CPU of all ranks",
        "first_leader_cpu": "first save: CPU of rank 0",
        "first_messages": "first save: calls that change the store",
        "first_looks": "first save: calls that ask the store",
        "first_collected_bytes": "first save: read by rank 0, catalogs and plans",
        "first_heard_bytes": "first save: read by all others",
    },
}
#: What one of an axis' units is called.
ONE = {"items": "item", "ranks": "rank"}


@dataclass
class Course:
    """The costs along one axis.

    Attributes:
        axis: a key of `COSTS`.
        runs: size to its repeats, each cost by its name or `error`; sizes ascend.
    """

    axis: str
    runs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """One cost at one size, of all items or ranks together.

    Attributes:
        median, low, high: over the repeats.
        each: the median for one item or rank.
        ratio: what one cost at the lowest, over the same at the size before; 1 is linear growth, less is better. None
            at the first size.
    """

    size: int
    median: float
    low: float
    high: float
    each: float
    ratio: float | None


def is_counted(cost: str) -> bool:
    """Whether a cost is a number of bytes or calls; otherwise it is seconds."""
    return cost.endswith(("bytes", "messages", "looks"))


def points(course: Course, cost: str) -> list[Point]:
    """A cost at all sizes where it was measured."""
    found: list[Point] = []
    for size, runs in course.runs.items():
        values = sorted(run[cost] for run in runs if cost in run)
        if not values:
            continue
        middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
        # The lowest repeats are those that others on the machine disturbed least.
        before = found[-1].low / found[-1].size if found else 0.0
        ratio = values[0] / size / before if before > 0 else None
        found.append(Point(size, middle, values[0], values[-1], middle / size, ratio))
    return found


def errors(course: Course) -> Iterator[str]:
    """What went wrong, a line for each size."""
    for size, runs in course.runs.items():
        failed = [run["error"] for run in runs if "error" in run]
        if failed:
            yield f"{size:,} {course.axis}: FAILED in {len(failed)} of {len(runs)}: {failed[0]}"


def write_growth(courses: Sequence[Course], folder: Path, about: Mapping[str, Any]) -> None:
    """Write `growth.json`, which has every run and can be read back, and `growth.csv`, which has the points.

    Args:
        courses: maybe of a run that goes on.
        folder: where to.
        about: the machine and the settings.
    """
    content = {"about": dict(about), "courses": [asdict(course) for course in courses]}
    columns = ("axis", "cost", *(each.name for each in fields(Point)))
    records = (
        {"axis": course.axis, "cost": cost, **asdict(point)}
        for course in courses
        for cost in COSTS[course.axis]
        for point in points(course, cost)
    )
    write_run(folder, _NAME, content, columns, records)


def read_growth(folder: str) -> tuple[list[Course], dict[str, Any]]:
    """The costs of an earlier run, and the notes on it.

    Raises:
        CheckpointConfigError: there are none in the folder.
    """

    def of(content: Any) -> tuple[list[Course], dict[str, Any]]:
        courses = [
            Course(each["axis"], {int(size): runs for size, runs in each["runs"].items()})
            for each in content["courses"]
            if each["axis"] in COSTS
        ]
        return courses, content["about"]

    return read_run(folder, _NAME, of, "ckpt-bench growth")
