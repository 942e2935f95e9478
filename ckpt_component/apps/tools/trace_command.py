"""`ckpt trace RUN`: what a run did and when, as a Chrome trace or a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...errors import CheckpointConfigError
from ..runs.records import read_runs
from ..runs.trace import write_trace
from ..sweeps.page import NO_PICTURE, can_plot, new_figure
from .output import Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Write a Chrome trace of the newest run of a folder: steps, stager, writer, commit and loads of every rank. "
        "Open the file in https://ui.perfetto.dev or chrome://tracing."
    )
    parser.epilog = "example:\n  ckpt trace checkpoints --png trace.png"
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of its checkpoints")
    parser.add_argument("--out", type=Path, metavar="FILE", default=Path("trace.json"), help="(trace.json)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the last saves; needs the extra plot")
    parser.add_argument("--last", type=int, metavar="N", help="only from the N-th last save on")


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
    newest = read_runs(parsed.run)[-1]
    shown = newest.saves()[-(parsed.last or 0) :]
    try:
        write_trace(parsed.out, newest, shown[0][0].time if parsed.last and shown else newest.began)
        if parsed.png is not None:
            from ..runs.timeline import draw_saves, height

            figure = new_figure(11, height(newest, parsed.last or 3))
            draw_saves(figure, newest, parsed.last or 3)
            figure.savefig(parsed.png, dpi=110, format="png")
    except OSError as error:
        raise CheckpointConfigError(f"{error.filename} cannot be written ({error.strerror}); type another.") from error
    files = [str(path) for path in (parsed.out, parsed.png) if path is not None]
    data = {"files": files, "saves": len(shown), "steps": len(newest.leader.ends), "ranks": len(newest.ranks)}
    output.result(
        data,
        lambda: [
            f"{' and '.join(files)}: {data['saves']} save(s) and {data['steps']} steps of {data['ranks']} rank(s)",
            "open it in https://ui.perfetto.dev (Open trace file) or chrome://tracing",
        ],
    )
