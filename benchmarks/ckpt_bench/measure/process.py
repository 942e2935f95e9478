"""The process of one row: reads what to measure from its arguments, writes the figures to a file.

Started by `bench.runs` with the interpreter of the row's environment, which may lack Hydra.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

#: Key of the error in the result file of a row that failed.
ERROR = "error"


def main(arguments: list[str]) -> int:
    """Measure one row.

    Args:
        arguments: one JSON text with `row`, `state`, `folder`, `result` and `settings`

    Returns:
        The exit code; 1 after an error, which is then in the result file.
    """
    task = json.loads(arguments[0])
    # Read at the import of torch. Threads that spin while waiting starve others on shared cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.filterwarnings("ignore")
    try:
        figures = _measure(task)
    except Exception as error:
        figures = {ERROR: f"{type(error).__name__}: {error}".splitlines()[0]}
        _write(task["result"], figures)
        raise
    _write(task["result"], figures)
    return 0


def _measure(task: dict[str, Any]) -> dict[str, Any]:
    from .limits import measure_limits
    from .row import RowSettings, measure_row
    from .row_kinds import LIMITS, ROWS
    from .states import make_state

    settings = RowSettings(**task["settings"])
    state = make_state(task["state"], device=settings.device)
    if task["row"] == LIMITS:
        return measure_limits(state, task["folder"], settings.saves, settings.cold)
    row = ROWS[task["row"]]
    if row.family == "ours" and not row.fast:
        _hide_packages()
    return measure_row(task["row"], state, task["folder"], settings)


def _hide_packages() -> None:
    """Prevent the import of packages that compute checksums faster than zlib."""
    from ckpt_component.core.storage.checksum import PROVIDERS

    modules: dict[str, Any] = {provider.module: None for provider in PROVIDERS if provider.package != "zlib"}
    sys.modules.update(modules)


def _write(path: str, figures: dict[str, Any]) -> None:
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(figures, file)
    os.replace(path + ".part", path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
