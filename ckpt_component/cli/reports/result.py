"""`result.json` in a job's output folder: its overrides and its result, for reports of sweeps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from .disks import Span
from .replaced import replaced

#: The file's name.
RESULT = "result.json"

#: Status of a job that has not ended, or was killed.
RUNNING = "running"

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
    # Unresolved, because an interpolation that cannot be resolved may be why the job failed.
    overrides = cast(list[Any], OmegaConf.to_container(settings.overrides.task, resolve=False))
    choices = {group: str(option) for group, option in settings.runtime.choices.items()}
    write_result(
        settings.runtime.output_dir, status, overrides=[str(word) for word in overrides], choices=choices, **result
    )


def _write(folder: str, content: Mapping[str, Any]) -> None:
    with replaced(Path(folder) / RESULT) as file:
        json.dump(content, file, indent=2, allow_nan=False, default=str)
        file.write("\n")
