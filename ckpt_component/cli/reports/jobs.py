"""Read the jobs of a sweep from its folder, even if it failed, was killed, or still runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config.hydra.hydra_errors import HydraConfigError
from ...config.hydra.hydra_job import is_about_saving
from .disks import Span
from .result import RESULT, RUNNING, STOPPED, has_ended, read_result, returned_value
from .sweep_figures import FIGURES


@dataclass(frozen=True)
class Row:
    """A row of the report: a job, or one measurement of a job.

    Attributes:
        job: the job's folder, relative to the sweep's
        name: name of the measurement; empty if it is the job's only one
        overrides: the job's overrides
        workload: description of what was saved; times of different workloads are not compared
        status: see `write_result`
        reason: why it did not complete, or has no figures
        figures: its values of `FIGURES`
        span: when the job ran and where it saved; None if unknown
        returned: what the job returned to the sweeper; None: nothing, or it is a job with several rows
    """

    job: str
    name: str = ""
    overrides: tuple[str, ...] = ()
    workload: str = ""
    status: str = "completed"
    reason: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    span: Span | None = None
    returned: Any = None

    @property
    def is_interrupted(self) -> bool:
        """Whether the job was killed or stopped, or still runs."""
        return self.status in (RUNNING, STOPPED)

    @property
    def stall_s(self) -> float | None:
        """The stall of later saves, or of the only save; None without saves."""
        return self.figures.get("stall_s", self.figures.get("first_stall_s"))

    @property
    def outcome(self) -> str:
        """Status and reason in one line."""
        status = "not finished (it runs, or was killed)" if self.status == RUNNING else self.status
        lines = (self.reason or "").strip().splitlines()
        return f"{status}: {lines[0]}" if lines else status


class NoJobsError(HydraConfigError):
    """A folder without jobs."""


def read_jobs(folder: Path) -> list[Row]:
    """All rows of a sweep in the order of its jobs, or the rows of a single run.

    Args:
        folder: folder of a job or a sweep, or one that contains several

    Raises:
        NoJobsError: the folder has no jobs
    """
    unreadable = list[OSError]()
    jobs = list(job_folders(folder, unreadable.append))
    if not jobs:
        raise NoJobsError(
            f"{folder} has no job with a {RESULT}, which hydra/callbacks=checkpoint_report writes; "
            "give the folder of a sweep, such as multirun/2026-11-21/10-30-00."
        )
    jobs += [Path(error.filename) for error in unreadable]  # may belong to a job
    return [row for job in sorted(jobs, key=_place) for row in _rows(job, folder)]


def job_folders(folder: Path, unreadable: Callable[[OSError], object] = lambda _: None) -> Iterator[Path]:
    """The folders of the jobs in a folder; none if it does not exist.

    Args:
        folder: folder of a job or a sweep, or one that contains several
        unreadable: called with the error of each folder that cannot be listed
    """
    for parent, folders, names in os.walk(folder, onerror=unreadable):
        if RESULT in names:
            folders.clear()  # do not walk its checkpoints, possibly many files
            yield Path(parent)


def _rows(job: Path, folder: Path) -> list[Row]:
    """The rows of a job; if it cannot be read, one row with the reason."""
    name = job.name if job == folder else str(job.relative_to(folder))
    try:
        return _rows_of(name, read_result(str(job)) or {})
    except Exception as error:  # a damaged job must not hide the others
        reason = f"it cannot be read ({type(error).__name__}: {' '.join(str(error).split())})"
        return [Row(name, status="unknown", reason=reason)]


def _rows_of(job: str, content: Mapping[str, Any]) -> list[Row]:
    overrides = tuple(content["overrides"])
    workload = " ".join(word for word in overrides if not is_about_saving(word))
    return [
        Row(
            job,
            row["name"],
            overrides,
            row["workload"],
            "failed" if row.get("reason") else content["status"],
            row.get("reason") or content["reason"],  # a row's own reason is more specific
            {key: float(row["figures"][key]) for key in FIGURES if row["figures"].get(key) is not None},
            Span.of(content),
            returned_value(content) if has_ended(content) and not content.get("rows") else None,
        )
        for row in content.get("rows") or [{"name": "", "workload": workload, "figures": content["figures"]}]
    ]


def _place(job: Path) -> list[tuple[int, str]]:
    """Sort key that places job 10 after job 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in job.parts]


def spans_of(rows: Sequence[Row]) -> dict[str, Span | None]:
    """When each job ran, in the order of the jobs."""
    return {row.job: row.span for row in sorted(rows, key=lambda row: _place(Path(row.job)))}


def differing(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The overrides of each row that not all rows share."""
    common = set.intersection(*(set(row.overrides) for row in rows)) if rows else set()
    return [tuple(word for word in row.overrides if word not in common) for row in rows]
