"""`ckpt trace RUN`: what a run did and when, as a Chrome trace or a picture."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from ...errors import CheckpointConfigError
from ..runs.records import Run, read_runs
from ..runs.trace import write_trace
from ..sweeps.page import NO_PICTURE, can_plot
from .output import Output

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Write a Chrome trace of a run: steps, stager, writer, commit and loads of every rank. Open the file in "
        "https://ui.perfetto.dev or chrome://tracing."
    )
    parser.epilog = "example:\n  ckpt trace checkpoints --png trace.png"
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of its checkpoints")
    parser.add_argument("--out", type=Path, metavar="FILE", default=Path("trace.json"), help="(trace.json)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the last saves; needs the extra plot")
    parser.add_argument("--all", action="store_true", help="all runs that saved there, not only the newest one")
    parser.add_argument("--last", type=int, metavar="N", help="only the last N saves, and the steps around them")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Write the trace.

    Raises:
        CheckpointNotFoundError: The folder has no events.
        CheckpointConfigError: An argument is invalid, or a file cannot be written.
    """
    if parsed.png is not None and not can_plot():
        raise CheckpointConfigError(NO_PICTURE)
    if parsed.last is not None and parsed.last < 1:
        raise CheckpointConfigError(f"--last={parsed.last} must be at least 1.")
    runs = read_runs(parsed.run)
    shown = runs if parsed.all else runs[-1:]
    files = [parsed.out]
    try:
        count = write_trace(parsed.out, shown, None if parsed.last is None else _window(shown[-1], parsed.last))
        if parsed.png is not None:
            from ..runs.timeline import draw

            draw(shown[-1], parsed.png, parsed.last or 3)
            files.append(parsed.png)
    except OSError as error:
        raise CheckpointConfigError(f"{error.filename} cannot be written ({error.strerror}); type another.") from error
    saves, steps = (sum(len(getattr(run.leader, name)) for run in shown) for name in ("saves", "ends"))
    names = [str(path) for path in files]
    data = {"files": names, "events": count, "runs": len(shown), "runs_there": len(runs)}
    output.result(
        data,
        lambda: [
            f"{' and '.join(names)}: {saves} save(s) and {steps} steps of {len(shown[-1].ranks)} rank(s)",
            "open it in https://ui.perfetto.dev (Open trace file) or chrome://tracing",
            *([f"the newest of {len(runs)} runs in {parsed.run}; --all shows all"] if len(runs) > len(shown) else []),
        ],
    )


def _window(run: Run, last: int) -> tuple[float, float]:
    """The time of the last saves, and some steps before and after."""
    saves, ends = run.leader.saves[-last:], run.leader.ends
    if not saves:
        return run.began, run.ended
    begin, end = saves[0].time, max(save.time + save.seconds for save in saves)
    step = (ends[-1][1] - ends[0][1]) / (len(ends) - 1) if len(ends) > 1 else 0
    margin = max((end - begin) / 10, 3 * step)
    return begin - margin, end + margin
