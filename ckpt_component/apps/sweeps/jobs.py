"""The jobs of a sweep, read from its folder: also when it failed, was killed, or still runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from ...config.errors import HydraConfigError
from .figures import FIGURES
from .result import RESULT, RUNNING, read_result

#: Written by Hydra into the folder of a job, and into that of a sweep.
_HYDRA, _SWEEP = ".hydra", "multirun.yaml"


@dataclass(frozen=True)
class Row:
    """What is compared with others: a job, or one of the things that a job measured.

    Attributes:
        job: the job's folder, as seen from the sweep's.
        name: which of the job's measurements; empty where it is the only one.
        overrides: what was typed for the job.
        workload: what was saved; times of different workloads are not compared.
        status: see `write_result`.
        reason: why it did not complete, or why it has no figures.
        figures: those of `FIGURES` that it has.
    """

    job: str
    name: str = ""
    overrides: tuple[str, ...] = ()
    workload: str = ""
    status: str = "completed"
    reason: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def stall_s(self) -> float | None:
        """That of later saves; of a job with one save, that of it; None without any."""
        return self.figures.get("stall_s", self.figures.get("first_stall_s"))

    @property
    def outcome(self) -> str:
        """Status and reason in one line."""
        status = "not finished (it runs, or was killed)" if self.status == RUNNING else self.status
        lines = (self.reason or "").strip().splitlines()
        return f"{status}: {lines[0]}" if lines else status


def read_jobs(folder: Path) -> list[Row]:
    """All rows of a sweep, in the order of its jobs; of a single run, its own.

    Args:
        folder: a job's or a sweep's, or one with several jobs in it.

    Raises:
        CheckpointConfigError: the folder has no jobs; the text says what it has instead.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise HydraConfigError(f"{folder} {what}; give the folder of a sweep, such as {_example(folder)}.")
    jobs, sweeps = list[Path](), list[Path]()
    for kind, path in _found(folder):
        (sweeps if kind == _SWEEP else jobs).append(path)
    if jobs:
        return [row for job in sorted(jobs, key=_place) for row in _rows(job, folder)]
    if sweeps:
        newest = max(sweeps, key=lambda path: (path / _SWEEP).stat().st_mtime)
        raise HydraConfigError(
            f"{folder} has {len(sweeps)} sweep{'s' * (len(sweeps) > 1)} in it and no job of its own; "
            f"type ckpt report {newest}, which is the newest."
        )
    if (folder / _SWEEP).is_file():
        raise HydraConfigError(f"{folder} is a sweep of which no job has begun, so there is nothing to report.")
    names = sorted(path.name for path in folder.iterdir())
    instead = f"holds {', '.join(names[:3])}{' and more' * (len(names) > 3)}" if names else "is empty"
    raise HydraConfigError(
        f"{folder} {instead}, and no {RESULT} of a job; give the folder of a sweep, such as {_example(folder)}."
    )


def _found(folder: Path) -> Iterator[tuple[str, Path]]:
    """The jobs below a folder, and the sweeps, into which it does not look when they are not the folder itself.

    A folder that cannot be looked into may be a job's.
    """
    closed = list[OSError]()
    for parent, folders, names in os.walk(folder, onerror=closed.append):
        path = Path(parent)
        if RESULT in names or _HYDRA in folders:
            folders.clear()  # its checkpoints may be many files
            yield _HYDRA, path
        elif _SWEEP in names and path != folder:
            folders.clear()
            yield _SWEEP, path
    for error in closed:
        yield _HYDRA, Path(error.filename)


def _rows(job: Path, folder: Path) -> list[Row]:
    """The rows of a job; of one that cannot be read, a row with the reason."""
    name = job.name if job == folder else str(job.relative_to(folder))
    overrides: tuple[str, ...] = ()
    try:
        content = read_result(str(job))
        if content is not None:
            return _rows_of(name, content)
        overrides = _overrides_of(job)
        reason = f"it left no {RESULT}; it runs without hydra/callbacks=checkpoint_report, or ended before it began"
    except Exception as error:  # whatever is wrong with one job, the others have their rows
        what = RESULT if (job / RESULT).is_file() else "folder"
        reason = f"its {what} cannot be read ({type(error).__name__}: {' '.join(str(error).split())})"
    return [Row(name, overrides=overrides, status="unknown", reason=reason)]


def _rows_of(name: str, content: Mapping[str, Any]) -> list[Row]:
    overrides, status, reason = tuple(content["overrides"]), content["status"], content["reason"]
    measured = content.get("rows", [])
    if not measured:
        workload = " ".join(word for word in overrides if not _is_about_saving(word))
        return [Row(name, "", overrides, workload, status, reason, _figures(content["figures"]))]
    # Why a row has no figures is more to the point than how the job ended.
    return [
        Row(
            name,
            row["name"],
            overrides,
            row["workload"],
            "failed" if row.get("reason") else status,
            row.get("reason") or reason,
            _figures(row["figures"]),
        )
        for row in measured
    ]


def _figures(found: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(found[key]) for key in FIGURES if found.get(key) is not None}


def _overrides_of(job: Path) -> tuple[str, ...]:
    """As Hydra noted them, where the job could not."""
    for path in sorted((job / _HYDRA).rglob("overrides.yaml")):
        # Unresolved: they may refer to what was not there, or is there no more.
        return tuple(map(str, cast(list[Any], OmegaConf.to_container(OmegaConf.load(path), resolve=False))))
    return ()


def _is_about_saving(override: str) -> bool:
    return override.lstrip("+~").startswith(("checkpoint.", "checkpoint/", "checkpoint=", "hydra"))


def _place(job: Path) -> list[tuple[int, str]]:
    """Job 10 comes after job 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in job.parts]


def _example(folder: Path) -> str:
    """A sweep that is there, near the folder or where sweeps go."""
    for parent in (folder.parent, Path("multirun")):
        if parent.is_dir():
            near = [path.parent for depth in ("*", "*/*", "*/*/*") for path in parent.glob(f"{depth}/{_SWEEP}")]
            if near:
                return str(max(near, key=lambda path: path.stat().st_mtime))
    return "multirun/2026-11-21/10-30-00"


def differing(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Of each row, the overrides that not all rows have."""
    common = set.intersection(*(set(row.overrides) for row in rows)) if rows else set()
    if len({row.overrides for row in rows}) == 1:
        return [() for _ in rows]
    return [tuple(word for word in row.overrides if word not in common) for row in rows]
