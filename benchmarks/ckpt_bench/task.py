"""The process of one measurement: reads from its arguments what to measure, and writes the figures to a file.

Started by `child.measure_in_child`, for a row with the interpreter of the row's environment, which may lack Hydra.
"""

from __future__ import annotations

import json
import os
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from ckpt_component.cli.reports.replaced import replaced

#: Key of the error in the result file of a measurement that failed.
ERROR = "error"


def main(arguments: list[str]) -> int:
    """Measure.

    Args:
        arguments: one JSON text with `call` (a module of this package and its function), the function's `arguments`,
            and `result`, the file to write. The function yields its figures part by part, so that one that is killed
            leaves those that it has.

    Returns:
        The exit code. An error is written to the result file and raised.
    """
    task = json.loads(arguments[0])
    # Read at the import of torch. Threads that spin while waiting starve others on shared cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.filterwarnings("ignore")
    module, _, function = task["call"].partition(":")
    figures: dict[str, Any] = {}
    try:
        for part in getattr(import_module(f".{module}", __package__), function)(**task["arguments"]):
            figures |= part
            _write(task, figures)
    except Exception as error:
        _write(task, {**figures, ERROR: f"{type(error).__name__}: {error}".splitlines()[0]})
        raise
    return 0


def _write(task: dict[str, Any], figures: dict[str, Any]) -> None:
    with replaced(Path(task["result"])) as file:
        json.dump(figures, file)
