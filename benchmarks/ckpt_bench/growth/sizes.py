"""Measure all sizes in turn, each in a fresh process with a deadline."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..child import package_roots, run_process
from ..runs import ERROR, read_result
from .costs import Course

_BOOT = (
    "import sys; sys.path += sys.argv.pop(1).split(':'); "
    "from ckpt_bench.growth.process import main; sys.exit(main(sys.argv[1:]))"
)


def measure_growth(
    sizes: Mapping[str, Sequence[int]],
    base: str,
    *,
    repeats: int,
    saves: int,
    timeout: float,
    logs: Path,
    say: Callable[[str], None],
    tell: Callable[[list[Course]], None],
) -> list[Course]:
    """Measure every size of every axis, in turn.

    Args:
        sizes: by axis; an axis without sizes is left out
        base: a folder to save to, in which one is made for every process and removed after it
        repeats: how often each size is measured
        saves: steady saves in each process
        timeout: seconds for one process
        logs: a folder that gets what a failed process printed
        say: gets a line of progress
        tell: gets what there is after every process, so that a run that is stopped leaves that
    """
    courses = [Course(axis, {size: [] for size in sorted(counts)}) for axis, counts in sizes.items() if counts]
    for repeat in range(repeats):
        for course in courses:
            for size, runs in course.runs.items():
                say(f"repeat {repeat + 1} of {repeats}: {size:,} {course.axis}")
                run = _measure_once(
                    course.axis, size, saves, base, timeout, logs / f"{course.axis}-{size}-{repeat}.log"
                )
                runs.append(run)
                tell(courses)
                if ERROR in run:
                    say(f"{size:,} {course.axis} FAILED: {run[ERROR]}")
    return courses


def _measure_once(axis: str, size: int, saves: int, base: str, timeout: float, log: Path) -> dict[str, Any]:
    place = tempfile.mkdtemp(prefix="ckpt-bench-", dir=base)
    try:
        data, result = os.path.join(place, "data"), os.path.join(place, "result.json")
        os.mkdir(data)
        task = {"axis": axis, "size": size, "saves": saves, "folder": data, "result": result}
        with open(log, "wb") as output:
            code = run_process([sys.executable, "-c", _BOOT, package_roots(), json.dumps(task)], output, timeout)
        run = read_result(result, code, log, timeout)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if ERROR not in run:
        log.unlink()
    return run
