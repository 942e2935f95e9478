"""`result.json` in a run's output folder: what was asked for, and what came of it; sweeps read these."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

#: The file's name.
RESULT = "result.json"


def write_result(
    folder: str,
    status: str,
    *,
    overrides: Sequence[str],
    choices: Mapping[str, str],
    figures: Mapping[str, Any] | None = None,
    reason: str | None = None,
) -> str:
    """Write the file, whole or not at all.

    Args:
        folder: the run's output folder; it exists.
        status: `completed`, `stopped`, `skipped` or `failed`.
        overrides: what was typed.
        choices: config group to option.
        figures: see `Summary.figures`.
        reason: why the run did not complete.

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
    }
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, allow_nan=False, default=str)
        file.write("\n")
    os.replace(path + ".part", path)
    return path
