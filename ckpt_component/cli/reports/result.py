"""`result.json` in a job's output folder: its overrides, its result, and what it returned.

Reports of sweeps read it, and a sweep that continues.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from ...config.hydra.hydra_job import task_overrides
from .disks import Span
from .replaced import replaced

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
