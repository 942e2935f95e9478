"""`ckpt report FOLDER`: report a sweep, finished or not."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser of `ckpt`."""
    parser = commands.add_parser(
        "report",
        help="compare the jobs of a sweep, even if it failed, was killed, or still runs",
        description="Print the jobs of a sweep sorted by stall, and write sweep.csv, sweep.png and sweep.html.",
    )
    parser.add_argument("folder", type=Path, help="folder of a sweep (multirun/...) or of a single run (outputs/...)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write the files, instead of FOLDER itself")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    """Make the report.

    Raises:
        CheckpointConfigError: The folder has no jobs, or the files cannot be written.
    """
    from ..sweeps.report import report

    report(parsed.folder, out=parsed.out)
