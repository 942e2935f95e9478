"""`ckpt report FOLDER`: report a sweep, finished or not."""

from __future__ import annotations

import argparse
from pathlib import Path

from .output import Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = "Print the jobs of a sweep sorted by stall, and write sweep.csv, sweep.png and sweep.html."
    parser.add_argument("folder", type=Path, help="folder of a sweep (multirun/...) or of a single run (outputs/...)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write the files, instead of FOLDER itself")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Make the report.

    Raises:
        CheckpointConfigError: The folder has no jobs, or the files cannot be written.
    """
    from ..sweeps.report import report

    report(parsed.folder, out=parsed.out)
