"""`ckpt trace RUN`: what a run did and when, as a Chrome trace.

Write a Chrome trace of the newest run of a folder that saved: steps, stager, writer, commit and loads of every rank.
Open the file in https://ui.perfetto.dev or chrome://tracing.

example:
  ckpt trace checkpoints --last 3
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import CheckpointConfigError
from .output import Output
from .reports.run_records import chosen_run, read_runs
from .reports.run_trace import write_trace
from .text import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of its checkpoints")
    parser.add_argument("--out", type=Path, metavar="FILE", default=Path("trace.json"), help="(trace.json)")
    parser.add_argument("--run", type=int, metavar="N", dest="number", help="this one, 1 is the oldest")
    parser.add_argument("--last", type=int, metavar="N", help="only the last N saves")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Write the trace.

    Raises:
        CheckpointNotFoundError: the folder has no events
        CheckpointConfigError: an argument is invalid, or a file cannot be written
    """
    if parsed.last is not None and parsed.last < 1:
        raise CheckpointConfigError(f"--last={parsed.last} must be at least 1.")
    runs = read_runs(parsed.run)
    number = chosen_run(runs, parsed.number)
    shown_run = runs[number]
    shown = shown_run.saves()[-(parsed.last or 0) :]
    try:
        write_trace(parsed.out, shown_run, shown[0][0].time if parsed.last and shown else shown_run.began)
    except OSError as error:
        raise CheckpointConfigError(f"{parsed.out} cannot be written ({error.strerror}); type another.") from error
    data = {"file": str(parsed.out), "run": number + 1, "saves": len(shown), "ranks": len(shown_run.ranks)}
    what = f"{parsed.out}: {counted(len(shown), 'save')} of {counted(len(shown_run.ranks), 'rank')}"
    what += f", run {number + 1} of {len(runs)}" if len(runs) > 1 else ""
    output.result(data, [what, "open it in https://ui.perfetto.dev (Open trace file) or chrome://tracing"])
