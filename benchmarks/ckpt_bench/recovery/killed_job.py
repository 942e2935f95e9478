"""Start a job, kill all its trainers and who started them, start it again, and tell how long each phase took."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

from ..measure.raw import block_of, copy
from .chain import chain_of
from .job_process import job
from .marks import now, read_marks
from .restart_rows import RESTART_ROWS

#: Durable checkpoints are saved every so many steps, and the job is killed after a later step.
_EVERY_STEPS, _KILLED_AFTER = 5, 8
_COPIES = 5


def measure_restart(row: str, state: str, ranks: int, step_seconds: float, folder: str) -> Iterator[dict[str, Any]]:
    """Kill a job after a few steps, and start it again until its first optimizer step has ended on all ranks.

    Args:
        row: a name of `RESTART_ROWS`
        state: name of the state whose weights are trained
        ranks: number of trainers; several are started by torchrun
        step_seconds: see `TrainedModel`
        folder: for checkpoints; empty before

    Yields:
        Seconds of the phases of `chain.PHASES`, of `restore`, and of `total`; `repeated`, the number of steps that were
        done again; `source`, where the state came from; `memcpy`, seconds in which all cores copy the states of all
        ranks once; `state_bytes`, those of one rank.

    Raises:
        RuntimeError: the job did not come as far as it must
    """
    kind = RESTART_ROWS[row]
    task = {
        **{"state": state, "step_seconds": step_seconds, "folder": os.path.join(folder, "run")},
        **{"resume": kind.resume, "is_whole": kind.is_whole, "overrides": list(kind.overrides)},
        "on_meta": kind.on_meta,
        "every_steps": _EVERY_STEPS,
    }
    before, after = os.path.join(folder, "before"), os.path.join(folder, "after")
    with own_sockets() as environment, job({**task, "steps": None}, ranks, before, environment) as first:
        first.wait(lambda marks: _last(marks, "kept") >= _KILLED_AFTER)
        killed = first.kill()
        gone = now()
        done = min(_last(marks, "step") for marks in read_marks(before).values())
        with job({**task, "steps": 1}, ranks, after, environment) as second:
            marks = second.wait(lambda marks: "first_step" in marks)
            second.finish()
    resumed = marks[0]["restored"][1]
    if resumed["step"] is None:
        raise RuntimeError("the job that was started again found no checkpoint")
    nbytes = marks[0]["built"][1]
    yield {
        **chain_of(killed, gone, marks),
        "repeated": done - resumed["step"],
        "source": resumed["source"],
        "state_bytes": nbytes,
        "memcpy": ranks * _copy_seconds(nbytes),
    }


def _last(marks: Mapping[str, tuple[float, Any]], name: str) -> int:
    """The newest step of a rank that has this mark; 0 if there is none."""
    return int(marks[name][1]) if name in marks else 0


def _copy_seconds(nbytes: int) -> float:
    source, target = block_of(nbytes), block_of(nbytes)
    return median(copy(source, target) for _ in range(_COPIES))


@contextmanager
def own_sockets() -> Iterator[dict[str, str]]:
    """A folder of its own for the sockets of servers, with a short path, as sockets need it: what sets it."""
    folder = tempfile.mkdtemp(prefix="ckpt-bench-")
    try:
        yield {"CKPT_RUNTIME_DIR": folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
