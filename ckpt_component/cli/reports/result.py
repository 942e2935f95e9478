"""`result.json` in a job's output folder: its overrides, its result, and what it returned.

Reports of sweeps read it, and a sweep that continues.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from ...config.hydra.hydra_errors import HydraConfigError
from ...config.hydra.hydra_job import is_about_saving, task_overrides
from ...core.outside import OUTSIDE
from ...core.storage.locate import absolute, is_url
from .replaced import replaced
from .sweep_figures import FIGURES

logger = logging.getLogger(__name__)

#: The file's name.
RESULT = "result.json"

#: Status of a job that has not ended, or was killed.
RUNNING = "running"

#: Status of a job that came to its end.
COMPLETED = "completed"

#: Status of a job that a signal ended, after it had saved its last step.
STOPPED = "stopped"

#: Key of what the job returned.
_RETURNED = "returned"

#: Keys of every such file.
_KEYS = {"status", "reason", "overrides", "figures"}


def write_result(
    folder: str,
    status: str,
    *,
    overrides: Sequence[str],
    choices: Mapping[str, str],
    figures: Mapping[str, Any] | None = None,
    reason: str | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the file atomically.

    Args:
        folder: the run's output folder, which exists
        status: `running`, `completed`, `stopped`, `skipped` or `failed`
        overrides: the overrides as typed
        choices: config group -> option
        figures: figures of the job; reports show those in `sweep_figures.FIGURES`
        reason: why the run did not complete
        rows: for a job with several measurements: the `name`, `workload` (only rows of equal workload are compared) and
            `figures` of each, and a `reason` if it has no figures
    """
    content = {
        "status": status,
        "reason": reason,
        "overrides": list(overrides),
        "choices": dict(choices),
        "figures": dict(figures or {}),
        "rows": [dict(row) for row in rows],
    }
    _write(folder, content)


def add_span(folder: str, span: Span) -> None:
    """Add to a job's result when it ran and where it saved."""
    content = read_result(folder)
    if content is not None:
        _write(folder, {**content, "ran": asdict(span)})


def add_returned(folder: str, value: Any) -> None:
    """Add to the result of a job that completed what it returned to Hydra."""
    content = read_result(folder)
    if content is None or content["status"] != COMPLETED:
        return
    try:
        # As text: the numbers that a job returns may be infinite or NaN, which JSON does not have.
        text = json.dumps(value, default=_plain)
    except (TypeError, ValueError, RuntimeError) as error:
        logger.info(
            "%s runs again if its sweep continues, because what it returned cannot be kept (%s); return numbers, texts "
            "or lists or dicts of them",
            folder,
            error,
        )
        return
    _write(folder, {**content, _RETURNED: text})


def has_ended(content: Mapping[str, Any]) -> bool:
    """Whether a result, as `read_result` returns it, is that of a job that completed and returned."""
    return content["status"] == COMPLETED and isinstance(content.get(_RETURNED), str)


def returned_value(content: Mapping[str, Any]) -> Any:
    """What a job returned that `has_ended`. A tuple has become a list, a tensor or a NumPy scalar a number."""
    return json.loads(content[_RETURNED])


def _plain(value: Any) -> Any:
    """The number in a tensor or a NumPy scalar."""
    if not hasattr(value, "item"):
        raise TypeError(f"it has a {type(value).__name__}")
    return value.item()


def read_result(folder: str) -> dict[str, Any] | None:
    """Read the file; None if it does not exist.

    Args:
        folder: the run's output folder

    Raises:
        ValueError: the file is damaged, or was written by another program
        OSError: it cannot be read
    """
    path = Path(folder) / RESULT
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not isinstance(content, dict) or not content.keys() >= _KEYS:
        raise ValueError("it was not written by ckpt_component")
    return content


def write_job_result(status: str, **result: Any) -> None:
    """Write the file of the Hydra job that runs in this process, with its overrides and choices.

    Args:
        status: as for `write_result`
        **result: `figures`, `reason` and `rows` of `write_result`
    """
    settings = HydraConfig.get()
    choices = {group: str(option) for group, option in settings.runtime.choices.items()}
    write_result(settings.runtime.output_dir, status, overrides=task_overrides(settings), choices=choices, **result)


def _write(folder: str, content: Mapping[str, Any]) -> None:
    with replaced(Path(folder) / RESULT) as file:
        json.dump(content, file, indent=2, allow_nan=False, default=str)
        file.write("\n")


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
