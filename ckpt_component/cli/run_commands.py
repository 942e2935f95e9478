"""`ckpt report`, `trace` and `watch`: what saving cost a run or a sweep, when it did what, and how it goes."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointConfigError, CheckpointNotFoundError, printable
from ..events import FOLDER
from .output import Output, counted, lines_of, width
from .reports.page import write_report
from .reports.run_records import PHASES, chosen_run, figures_of, read_runs
from .reports.run_report import blocks, write_trace

if TYPE_CHECKING:
    from rich.text import Text

#: The file that a job of a sweep writes; `reports.result` imports Hydra.
_RESULT = "result.json"


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="folder of checkpoints, of a sweep (multirun/...) or of a job"
    )
    parser.add_argument("--run", type=int, metavar="N", help="of several runs this one (the newest that saved)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write the files (a run: FOLDER/events; a sweep: FOLDER)"
    )


def run_report(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt report FOLDER`: report a run or a sweep, finished or not.

    For the folder of a run's checkpoints: its saves phase by phase, loads, failures, and the share of time that
    training kept, as text, run.png and run.html. For a sweep: its jobs sorted by stall, as text, sweep.csv, sweep.png
    and sweep.html.

    examples:
      ckpt report checkpoints
      ckpt report multirun/2026-11-21/10-30-00

    Training kept: the share of the time between the first and the last
    recorded step that saves did not cost. Loads, and the wait for the last
    save of a run, are not in it.
    """
    folder: Path = parsed.folder
    if (folder / FOLDER).is_dir():
        from .reports.run_records import chosen_run, figures_of, read_runs
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


def trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of its checkpoints")
    parser.add_argument("--out", type=Path, metavar="FILE", default=Path("trace.json"), help="(trace.json)")
    parser.add_argument("--run", type=int, metavar="N", dest="number", help="this one, 1 is the oldest")
    parser.add_argument("--last", type=int, metavar="N", help="only the last N saves")


def run_trace(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt trace RUN`: what a run did and when, as a Chrome trace.

    Write a Chrome trace of the newest run of a folder that saved: steps, stager, writer, commit and loads of every
    rank. Open the file in https://ui.perfetto.dev or chrome://tracing.

    example:
      ckpt trace checkpoints --last 3
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


#: Phase -> its colour in the bar, as near to that of the picture as a terminal has it.
_COLORS = dict(
    zip(PHASES, ("yellow", "magenta", "red", "bright_yellow", "blue", "cyan", "bright_green", "green"), strict=True)
)
_MAX_SAVES = 50


def watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of checkpoints; it may still be missing")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks (1)")


def run_watch(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt watch FOLDER`: the report of a run as one screen that follows it, until Ctrl-C.

    Show the newest run of a folder of checkpoints while it trains: steps, the last saves phase by phase, uploads and
    failures. It reads the run's events, which are written with each save, and nothing of the run waits for it. It needs
    rich: pip install rich.

    example:
      ckpt watch checkpoints
    """
    if output.as_json or not sys.stdout.isatty():
        raise CheckpointConfigError(f"ckpt watch needs a terminal; ckpt report {parsed.folder} prints the same once.")
    if not parsed.every > 0:
        raise CheckpointConfigError(f"--every={parsed.every}: give seconds above 0.")
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError as error:
        raise CheckpointConfigError("ckpt watch needs rich: pip install rich.") from error
    watched = _Watched(parsed.folder)
    try:
        with Live(Text(""), screen=True, auto_refresh=False) as live:
            while True:
                live.update(Text("\n").join(watched.lines(live.console.height)), refresh=True)
                time.sleep(parsed.every)
    except KeyboardInterrupt:
        return


class _Watched:
    """The runs of a folder. The events are read again only when a file of theirs has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[Path, tuple[int, int]] = {}
        self._figures: list[dict[str, Any]] = []
        self._why = ""

    def lines(self, height: int) -> Iterator[Text]:
        """The lines of a screen of a height: of the report with as many saves as fit, and the bar of the last save."""
        from rich.text import Text

        self._look()
        if not self._figures:
            yield from map(Text, [printable(self._why), "", "waiting for the first save; Ctrl-C ends this"])
            return
        bar = [*self._bar()]
        room = height - len(bar) - 1
        for limit in range(_MAX_SAVES, 0, -1):
            lines = [*lines_of(blocks(self._folder, self._figures, limit=limit), width())]
            if len(lines) <= room:
                break
        yield from map(Text, map(printable, itertools.islice(lines, room)))
        yield from bar

    def _look(self) -> None:
        """Read the events again, if there are any that have not been read."""
        try:
            seen = {
                path: (path.stat().st_size, path.stat().st_mtime_ns) for path in (self._folder / FOLDER).glob("*.jsonl")
            }
        except FileNotFoundError:  # deleted between two looks
            return
        if seen == self._seen and (seen or self._why):
            return
        self._seen = seen
        try:
            self._figures = [figures_of(each) for each in read_runs(self._folder)]
        except CheckpointNotFoundError as error:
            self._figures, self._why = [], str(error)

    def _bar(self) -> Iterator[Text]:
        """The phases of the newest run's last save as one bar, and what its colours mean."""
        from rich.text import Text

        saves = self._figures[-1]["saves"]
        phases = {name: saves[-1].get(f"{name}_s") or 0.0 for name in PHASES} if saves else {}
        whole = sum(phases.values())
        if not whole:
            return
        bar, legend = Text(""), Text("")
        for name, seconds in phases.items():
            bar.append("█" * round(seconds / whole * width()), _COLORS[name])
            if seconds:
                legend.append("█ ", _COLORS[name]).append(f"{name}  ")
        yield Text("")
        yield Text(f"step {saves[-1]['step']}, {saves[-1]['outcome']}:")
        yield bar
        yield legend
