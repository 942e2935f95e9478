"""`ckpt report FOLDER`: report a run or a sweep, finished or not.

For the folder of a run's checkpoints: its saves phase by phase, loads, failures, and the share of time that training
kept, as text, run.png and run.html. For a sweep: its jobs sorted by stall, as text, sweep.csv, sweep.png and
sweep.html.

examples:
  ckpt report checkpoints
  ckpt report multirun/2026-11-21/10-30-00

Training kept: the share of the time between the first and the last
recorded step that saves did not cost. Loads, and the wait for the last
save of a run, are not in it.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from ..errors import CheckpointNotFoundError
from ..events import FOLDER
from .output import Output, width
from .reports.page import write_report
from .text import lines_of

#: The file that a job of a sweep writes; `reports.result` imports Hydra.
_RESULT = "result.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="folder of checkpoints, of a sweep (multirun/...) or of a job"
    )
    parser.add_argument("--run", type=int, metavar="N", help="of several runs this one (the newest that saved)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write the files (a run: FOLDER/events; a sweep: FOLDER)"
    )


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Make the report. With `--json` files are written only where `--out` says.

    Raises:
        CheckpointNotFoundError: the folder has neither events nor jobs
        CheckpointConfigError: the files cannot be written
    """
    folder: Path = parsed.folder
    if (folder / FOLDER).is_dir():
        from .reports.run_figures import figures_of
        from .reports.run_records import chosen_run, read_runs
        from .reports.run_report import blocks, write_files

        runs = read_runs(folder)
        shown = chosen_run(runs, parsed.run)
        figures = [figures_of(run) for run in runs]
        output.result(
            {"kind": "run", "shown": shown + 1, "runs": figures}, lines_of(blocks(folder, figures, shown), width())
        )
        write, place = partial(write_files, runs, folder, figures, shown), folder / FOLDER
    else:
        _refuse_without_jobs(folder)
        from .reports import sweep_report as sweep

        rows = sweep.read_rows(folder)
        output.result(
            {"kind": "sweep", "rows": sweep.records(rows)},
            [*sweep.table(rows).splitlines(), *sweep.how_to_continue(rows, folder)],
        )
        write, place = partial(sweep.write_files, rows, folder), folder
    if parsed.out is not None or not output.as_json:
        write_report(write, parsed.out or place, lambda line: output.show([line]))


def _refuse_without_jobs(folder: Path) -> None:
    if not any(_RESULT in names for _, _, names in os.walk(folder)):
        from .reports.run_records import why_no_run

        sweep = " The jobs of a sweep need hydra/callbacks=checkpoint_report." if folder.is_dir() else ""
        raise CheckpointNotFoundError(why_no_run(folder) + sweep)
