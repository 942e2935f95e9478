"""`ckpt-bench recovery`: kill jobs of each row in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..child import Run, measure_in_child
from ..place import place
from ..schema import BenchRequest
from ..task import ERROR
from .restart_rows import MEMORY
from .restarts import Restarts, write_restarts


def measure_turns(
    request: BenchRequest, parent: tuple[Path, str], about: Mapping[str, Any], folder: Path, say: Callable[[str], None]
) -> list[Restarts]:
    """Measure every row and number of ranks that the config selects, in turn, each in a fresh process.

    Args:
        request: the config
        parent: folder for the checkpoints, and the key that set it
        about: the machine and the settings
        folder: where the figures are written after every process, so that a run that is stopped leaves them; and what a
            failed process printed
        say: called with each line of progress
    """
    bench, (state,) = request.bench, request.states
    measured = [Restarts(ranks, {row: [] for row in request.rows}) for ranks in request.sizes["ranks"]]
    with place(parent[0], f"{parent[1]}=") as base:

        def measure(call: str, arguments: Mapping[str, Any], name: str, repeat: int) -> Run:
            say(f"repeat {repeat + 1} of {bench.repeats}: {name}")
            log = folder / f"{name.replace(', ', '-').replace(' ', '-')}-{repeat}.log"
            settings = {"state": state, "step_seconds": bench.step_seconds, **arguments}
            run = measure_in_child(f"recovery.{call}", settings, base, log, bench.row_timeout)
            if ERROR in run:
                say(f"{name} FAILED: {run[ERROR]}")
            return run

        for repeat in range(bench.repeats):
            for each in measured:
                ranks = f"{each.ranks} rank{'s' * (each.ranks > 1)}"
                for row, runs in each.rows.items():
                    arguments = {"row": row, "ranks": each.ranks}
                    runs.append(measure("killed_job:measure_restart", arguments, f"{row}, {ranks}", repeat))
                    write_restarts(measured, folder, about)
                if each.ranks == 1 and MEMORY in each.rows:
                    arguments = {"pairs": bench.pairs}
                    each.lost.append(measure("snapshot_cost:measure_snapshots", arguments, "snapshots", repeat))
                    write_restarts(measured, folder, about)
    return measured
