"""The process of one size: reads what to measure from its arguments, writes the costs to a file."""

from __future__ import annotations

import json
import os
import warnings
from typing import Any


def main(arguments: list[str]) -> int:
    """Measure one size.

    Args:
        arguments: one JSON text with `axis`, `size`, `saves`, `folder` and `result`

    Returns:
        The exit code. An error is written to the result file and raised.
    """
    task = json.loads(arguments[0])
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # importing torch reads this
    warnings.filterwarnings("ignore")
    try:
        costs = _measure(task)
    except Exception as error:
        _write(task["result"], {"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        raise
    _write(task["result"], costs)
    return 0


def _measure(task: dict[str, Any]) -> dict[str, Any]:
    if task["axis"] == "ranks":
        from .rank_costs import measure_ranks

        return dict(measure_ranks(task["size"], task["saves"], task["folder"]))
    from .item_costs import measure_items

    return dict(measure_items(task["size"], task["saves"], task["folder"]))


def _write(path: str, costs: dict[str, Any]) -> None:
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(costs, file)
    os.replace(path + ".part", path)
