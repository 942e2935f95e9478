"""Who waits how long: none waits for the dead, and no two wait for each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.keepers import HostKeeper
    from simulation.recovery import Job, Life


@dataclass
class Wait:
    """A restore of a rank: from when until when, also if it failed."""

    job: int
    rank: int
    since: float
    until: float


def waits_for_the_dead(life: Life) -> Iterator[str]:
    """What has waited longer than for the end of what really failed.

    A restore, or the end of a save whose trainers have died, may take `life.patience`, and the time in which a process is
    stopped, a link is not well, or ranks have yet to notice that one of them has died.
    """
    for each in life.waited:
        seconds = each.until - each.since - _excused(life, each.since, each.until)
        if seconds > life.patience:
            yield f"rank {each.rank} of job {each.job} waited {seconds:.1f} s in its restore"
    for keeper in life.host.keepers:
        job = next((job for job in life.jobs if keeper.trainer in job.processes), None)
        if job is not None:
            yield from _of_keeper(life, keeper, job)


def _of_keeper(life: Life, keeper: HostKeeper, job: Job) -> Iterator[str]:
    """What a keeper has waited for after the last trainer of its run has died."""
    over = max(process.ended_at for process in job.processes)
    for since, until in keeper.undecided:
        since, until = max(since, over), min(until, keeper.process.ended_at)
        seconds = until - since - _excused(life, since, until)
        if seconds > life.patience:
            yield f"{keeper.process.name} had an undecided save for {seconds:.1f} s after its job was over"


def _excused(life: Life, since: float, until: float) -> float:
    """How much of a time a process may have waited for what has failed."""
    return _covered(life.excuses(), since, until)


def _covered(spans: Iterable[tuple[float, float]], since: float, until: float) -> float:
    """How much of a time lies in any of these."""
    total = 0.0
    for start, end in sorted(spans):
        start, end = max(start, since), min(end, until)
        total += max(end - start, 0.0)
        since = max(since, end)
    return total
