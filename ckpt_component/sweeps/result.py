"""`result.json` in a job's output folder: what was asked for, and what came of it; reports of sweeps read these."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from .replaced import replaced

#: The file's name.
RESULT = "result.json"

#: What a job that has begun says until it is over; after that, one that was killed.
RUNNING = "running"


def write_result(
    folder: str,
    status: str,
    *,
    overrides: Sequence[str],
    choices: Mapping[str, str],
    figures: Mapping[str, Any] | None = None,
    reason: str | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Write the file, whole or not at all.

    Args:
        folder: the run's output folder; it exists.
        status: `running`, `completed`, `stopped`, `skipped` or `failed`.
        overrides: what was typed.
        choices: config group to option.
        figures: of the job; a report shows those that `sweeps.figures.FIGURES` names.
        reason: why the run did not complete.
        rows: of a job that measures several things: for each its `name`, its `workload` (rows of one can be compared),
            its `figures`, and a `reason` where it has none.

    Returns:
        The file's path.
    """
    path = os.path.join(folder, RESULT)
    content = {
        "status": status,
        "reason": reason,
        "overrides": list(overrides),
        "choices": dict(choices),
        "figures": dict(figures or {}),
        "rows": [dict(row) for row in rows],
    }
    with replaced(Path(path)) as file:
        json.dump(content, file, indent=2, allow_nan=False, default=str)
        file.write("\n")
    return path


def write_job_result(
    status: str,
    *,
    figures: Mapping[str, Any] | None = None,
    reason: str | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the file of the Hydra job that runs in this process, with what was typed for it.

    Args:
        status: as for `write_result`, and so are the others.
        figures: of the job.
        reason: why it did not complete.
        rows: of a job that measures several things.
    """
    settings = HydraConfig.get()
    write_result(
        settings.runtime.output_dir,
        status,
        overrides=list(settings.overrides.task),
        choices={group: str(option) for group, option in settings.runtime.choices.items()},
        figures=figures,
        reason=reason,
        rows=rows,
    )
