"""The costs measured at growing sizes, in total and per item or rank, and their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from ..kept import read_run, write_run
from ..task import ERROR

#: The files are `growth.json` and `growth.csv`.
_NAME = "growth"

#: Axis -> cost -> description. Names ending in `bytes`, `messages` and `looks` are counts, all others seconds.
COSTS: Mapping[str, Mapping[str, str]] = {
    "items": {
        "survey": "first save: find the tensors and record their structure",
        "layout": "first save: lay out the files",
        "templates": "first save: the bytes around payloads, for as many shapes as items",
        "describe": "first save: describe the layout for readers",
        "index": "first save: .metadata",
        "first_stall": "first save: the whole call",
        "first_save": "first save: until it is committed",
        "walk": "every save: find the tensors",
        "check": "every save: compare the structure",
        "stage": "every save: copy the tensors",
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
        "leader_cpu": "every save: CPU of rank 0, the store's server included",
        "messages": "every save: calls that change the store",
        "leader_messages": "every save: such calls of rank 0",
        "looks": "every save: calls that read the store",
        "collected_bytes": "every save: read by rank 0 from the store, mostly votes",
        "heard_bytes": "every save: read by all others",
        "first_leader_cpu": "first save: CPU of rank 0",
        "first_messages": "first save: calls that change the store",
        "first_looks": "first save: calls that read the store",
        "first_collected_bytes": "first save: read by rank 0, catalogs and plans",
        "first_heard_bytes": "first save: read by all others",
    },
    "hosts": {
        "messages": "every snapshot to its peers: calls that change the store",
        "leader_messages": "every snapshot to its peers: such calls of rank 0",
        "looks": "every snapshot to its peers: calls that read the store",
        "collected_bytes": "every snapshot to its peers: read by rank 0 from the store",
        "heard_bytes": "every snapshot to its peers: read by all others",
        "begin_messages": "when a run begins: calls that change the store",
        "begin_leader_messages": "when a run begins: such calls of rank 0",
        "begin_looks": "when a run begins: calls that read the store",
        "begin_collected_bytes": "when a run begins: read by rank 0",
        "begin_heard_bytes": "when a run begins: read by all others",
        "restore_messages": "a restore from memory: calls that change the store",
        "restore_leader_messages": "a restore from memory: such calls of rank 0",
        "restore_looks": "a restore from memory: calls that read the store",
        "restore_collected_bytes": "a restore from memory: read by rank 0, where snapshot servers are",
        "restore_heard_bytes": "a restore from memory: read by all others, each of which hears of all snapshot servers",
    },
}
#: Name of one unit of an axis.
ONE = {"items": "item", "ranks": "rank", "hosts": "host"}
#: Costs that grow with the square of the number, as each rank reads what all have written.
SQUARES = frozenset({"restore_heard_bytes"})


@dataclass
class Course:
    """The costs along one axis.

    Attributes:
        axis: a key of `COSTS`
        runs: size -> repeats, each with its costs by name or with `ERROR`; sizes ascend
    """

    axis: str
    runs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """One cost at one size, for all items or ranks together.

    Attributes:
        median, low, high: over the repeats
        each: the median per item or rank
        ratio: lowest cost per item or rank, divided by that of the previous size; 1 is linear growth, less is better.
            None at the first size.
    """

    size: int
    median: float
    low: float
    high: float
    each: float
    ratio: float | None


def is_counted(cost: str) -> bool:
    """Whether a cost is a number of bytes or calls, not seconds."""
    return cost.endswith(("bytes", "messages", "looks"))


def points(course: Course, cost: str) -> list[Point]:
    """A cost at all measured sizes."""
    result: list[Point] = []
    for size, runs in course.runs.items():
        values = [run[cost] for run in runs if cost in run]
        if not values:
            continue
        middle, low = median(values), min(values)
        # The lowest repeat is the one least disturbed by other work on the machine.
        before = result[-1].low / result[-1].size if result else 0.0
        ratio = low / size / before if before > 0 else None
        result.append(Point(size, middle, low, max(values), middle / size, ratio))
    return result


def errors(course: Course) -> Iterator[str]:
    """One line for each size with failures."""
    for size, runs in course.runs.items():
        failed = [run[ERROR] for run in runs if ERROR in run]
        if failed:
            yield f"{size:,} {course.axis}: FAILED in {len(failed)} of {len(runs)}: {failed[0]}"


def write_growth(courses: Sequence[Course], folder: Path, about: Mapping[str, Any]) -> None:
    """Write every run to `growth.json`, which can be read back, and the points to `growth.csv`.

    Args:
        courses: the costs, also of an unfinished run
        folder: where to write
        about: the machine and the settings
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
    """Read the costs and the description of an earlier run.

    Raises:
        CheckpointConfigError: the folder has no costs
    """

    def of(content: Any) -> tuple[list[Course], dict[str, Any]]:
        courses = [
            Course(each["axis"], {int(size): runs for size, runs in each["runs"].items()})
            for each in content["courses"]
            if each["axis"] in COSTS
        ]
        return courses, content["about"]

    return read_run(folder, _NAME, of, "ckpt-bench growth")
