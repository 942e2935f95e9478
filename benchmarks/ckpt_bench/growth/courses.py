"""`ckpt-bench growth`: measure all sizes in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..child import measure_in_child
from ..place import place
from ..schema import BenchRequest
from ..task import ERROR
from .costs import Course, write_growth

#: What measures one size of an axis.
_CALLS = {
    "items": "growth.item_costs:measure_items",
    "ranks": "growth.rank_costs:measure_ranks",
    "hosts": "growth.peer_costs:measure_hosts",
}


def measure_courses(
    request: BenchRequest, parent: tuple[Path, str], about: Mapping[str, Any], folder: Path, say: Callable[[str], None]
) -> list[Course]:
    """Measure every size that the config selects, in turn, each in a fresh process.

    Args:
        request: the config
        parent: folder for the checkpoints, and the key that set it
        about: the machine and the settings
        folder: where the costs are written after every process, so that a run that is stopped leaves them; and what a
            failed process printed
        say: called with each line of progress
    """
    bench = request.bench
    courses = [Course(axis, {size: [] for size in sizes}) for axis, sizes in request.sizes.items() if sizes]
    with place(parent[0], f"{parent[1]}=") as base:
        for repeat in range(bench.repeats):
            for course in courses:
                for size, runs in course.runs.items():
                    say(f"repeat {repeat + 1} of {bench.repeats}: {size:,} {course.axis}")
                    log = folder / f"{course.axis}-{size}-{repeat}.log"
                    arguments = {"count": size, "saves": bench.saves}
                    run = measure_in_child(_CALLS[course.axis], arguments, base, log, bench.row_timeout)
                    runs.append(run)
                    write_growth(courses, folder, about)
                    if ERROR in run:
                        say(f"{size:,} {course.axis} FAILED: {run[ERROR]}")
    return courses
