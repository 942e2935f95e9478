"""`ckpt watch FOLDER`: the report of a run as one screen that follows it, until Ctrl-C.

Show the newest run of a folder of checkpoints while it trains: steps, the last saves phase by phase, uploads and
failures. It reads the run's events, which are written with each save, and nothing of the run waits for it. It needs
rich: pip install rich.

example:
  ckpt watch checkpoints
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointConfigError, CheckpointNotFoundError, printable
from ..events import FOLDER
from .output import Output, width
from .reports.run_figures import figures_of
from .reports.run_records import PHASES, read_runs
from .reports.run_report import blocks
from .text import lines_of

if TYPE_CHECKING:
    from rich.text import Text

#: Phase -> its colour in the bar, as near to that of the picture as a terminal has it.
_COLORS = dict(
    zip(PHASES, ("yellow", "magenta", "red", "bright_yellow", "blue", "cyan", "bright_green", "green"), strict=True)
)
_MAX_SAVES = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of checkpoints; it may still be missing")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks (1)")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Show the screen until Ctrl-C.

    Raises:
        CheckpointConfigError: stdout is not a terminal, the arguments are wrong, or rich is not installed
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
