"""A process as a run starts it in the background: how long it takes, and its CPU time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpt_component.core.processes.start import describe_exit, start_in_background

from .spent import Spent, SpentClock

#: Of a process that is started in the background.
NICE = 15
_SECONDS = 600.0
_LEAVE_SECONDS = 5.0


class Work(NamedTuple):
    """What a process did.

    Attributes:
        spent: seconds from before its start until its answer, and CPU time of all of it
        answer: what it answered
    """

    spent: Spent
    answer: Mapping[str, Any]


def work_in_background(module: str, job: Mapping[str, Any]) -> Work:
    """Start a process of the package with a job, and wait for its answer and its end.

    Raises:
        RuntimeError: it failed
        TimeoutError: it did not answer in time
    """
    clock = SpentClock()
    process = start_in_background(module, job)
    try:
        frame = process.receive(time.monotonic() + _SECONDS)
        seconds = clock.spent().seconds
    finally:
        code = process.end(_LEAVE_SECONDS)
    answer = {"error": f"its process {describe_exit(code)}"} if frame is None else frame[0]
    for failure in ("error", "fenced", "gone"):
        if failure in answer:
            raise RuntimeError(f"{module}: {answer[failure]}")
    return Work(clock.spent()._replace(seconds=seconds), answer)
