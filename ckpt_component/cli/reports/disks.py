"""Which jobs of a sweep saved to one disk at the same time, so that their times include each other's writes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.outside import OUTSIDE
from ...core.storage.locate import absolute, is_url

#: How many jobs a message names one by one.
_NAMED = 8


@dataclass(frozen=True)
class Span:
    """When a job ran, and where it saved.

    Attributes:
        began: seconds since 1970
        ended: seconds since 1970
        disks: of its checkpoint folders, see `disk_of`; empty if it saved nothing
    """

    began: float
    ended: float
    disks: tuple[str, ...] = ()

    def meets(self, other: Span) -> bool:
        """Whether both ran at the same time."""
        return self.began < other.ended and other.began < self.ended

    @staticmethod
    def of(content: Mapping[str, Any]) -> Span | None:
        """Read it from a job's result; None if the job has not ended, or ran without the report."""
        ran = content.get("ran")
        return Span(float(ran["began"]), float(ran["ended"]), tuple(map(str, ran["disks"]))) if ran else None


def disk_of(folder: str) -> str:
    """The disk of a folder: the same text in all processes that write to it, and for a network disk on all hosts.

    That of a URL is its bucket.
    """
    if is_url(folder):
        return "/".join(absolute(folder).split("/")[:3])
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    source = _mount_source(number)
    if ":" in source or source.startswith("//"):  # server:/export
        return source
    name = source if source.startswith("/dev/") else f"{source} {number}".strip()
    return f"{name} of {OUTSIDE.host_name()}"


def _mount_source(number: str) -> str:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                mount, _, kind = line.partition(" - ")
                if mount.split()[2:3] == [number]:
                    return kind.split()[1]
    except OSError:
        return ""  # /proc is missing or not readable: the device's number alone
    return ""


def shared_disks(spans: Mapping[str, Span | None]) -> dict[str, list[str]]:
    """Disk -> the jobs that saved to it while another job did; disks without such jobs are left out.

    Args:
        spans: by job; None is ignored
    """
    users: dict[str, dict[str, Span]] = {}
    for job, span in spans.items():
        for disk in span.disks if span else ():
            users.setdefault(disk, {})[job] = span  # type: ignore[assignment]
    return {
        disk: jobs
        for disk, ran in users.items()
        if (
            jobs := [
                job for job, span in ran.items() if any(span.meets(two) for name, two in ran.items() if name != job)
            ]
        )
    }


def shared_text(disk: str, jobs: Sequence[str]) -> str:
    """The warning below a report."""
    shown = list(jobs) if len(jobs) <= _NAMED else [*jobs[: _NAMED - 1], f"... ({len(jobs)} in all), {jobs[-1]}"]
    return (
        f"jobs {', '.join(shown)} saved to one disk at the same time ({disk}): their times include each other's writes "
        "and are not comparable; for figures, run one job at a time."
    )
