"""`result.json` in a job's output folder: what was asked for, and what came of it; reports of sweeps read these."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from .replaced import replaced

#: The file's name.
RESULT = "result.json"

#: What a job that has begun says until it is over; after that, one that was killed.
RUNNING = "running"

#: What every such file has.
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
    """
    content = {
        "status": status,
        "reason": reason,
        "overrides": list(overrides),
        "choices": dict(choices),
        "figures": dict(figures or {}),
        "rows": [dict(row) for row in rows],
    }
    with replaced(Path(folder) / RESULT) as file:
        json.dump(content, file, indent=2, allow_nan=False, default=str)
        file.write("\n")


def read_result(folder: str) -> dict[str, Any] | None:
    """The content of the file, or None where there is none.

    Args:
        folder: the run's output folder.

    Raises:
        ValueError: the file is another program's, or damaged.
        OSError: it cannot be read.
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
    """Write the file of the Hydra job that runs in this process, with what was typed for it.

    Args:
        status: as for `write_result`.
        **result: `figures`, `reason` and `rows` of `write_result`.
    """
    settings = HydraConfig.get()
    # Unresolved: what was typed may refer to what is not there, and that is why the job failed.
    overrides = cast(list[Any], OmegaConf.to_container(settings.overrides.task, resolve=False))
    choices = {group: str(option) for group, option in settings.runtime.choices.items()}
    write_result(
        settings.runtime.output_dir, status, overrides=[str(word) for word in overrides], choices=choices, **result
    )
