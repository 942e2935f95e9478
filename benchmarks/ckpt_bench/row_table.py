"""Format the figures of one state on one target as a table."""

from __future__ import annotations

from ckpt_component.cli.output import Table, counted

from .measure.row_kinds import LIMITS
from .row_figures import FIGURES, Spread, fact, limits_of, measured_rows, spread, why_not
from .runs import Case

_COLUMNS = {figure: column for figure, column in FIGURES.items() if column is not None}

LEGEND = """seconds unless noted, the median of the repeats (lowest .. highest)
stall: the call of save; staged: until the tensors may be changed; complete: until the row says so; durable: synced
lost: training time lost to one save, by cycles with a save and without one in turn; its CPU, queued: of the loop's
thread, the CPU time and the wait for a core in it; step x: step time while it is written, over that without a save;
next 10 x: of the ten steps that follow the call
memory: peak above the process before its first save, with all processes that it started; whole: does the file hold the
values from before the update that follows the save"""


def render(case: Case) -> str:
    """The table of one case: rows with figures, then those without and why, then the limits."""
    nbytes = next((found for row in case.rows if (found := fact(case, row, "state_bytes")) is not None), None)
    size = "" if nbytes is None else f", {nbytes / 1e9:.2f} GB"
    lines = [["", *(column.title for column in _COLUMNS.values()), "whole"]]
    for row in measured_rows(case):
        cells = [_cell(spread(case, row, figure), *column[1:]) for figure, column in _COLUMNS.items()]
        lines.append([row, *cells, _whole(case, row)])
    repeats = max((len(case.rows[row]) for row in measured_rows(case)), default=0)
    text = [f"\n{case.state} on {case.target}{size}" + (f", {counted(repeats, 'repeat')}" if repeats else "")]
    if len(lines) > 1:
        text += Table(lines).text()
    text += [f"{row}: {reason}" for row in case.rows if (reason := why_not(case, row)) is not None]
    text += [_limit(name, found, nbytes) for name, found in limits_of(case).items()]
    return "\n".join(text)


def _cell(found: Spread | None, factor: float, digits: int) -> str:
    if found is None:
        return "-"
    middle, low, high = (f"{value * factor:.{digits}f}" for value in (found.median, found.low, found.high))
    return middle if low == high else f"{middle} ({low}..{high})"


def _whole(case: Case, row: str) -> str:
    torn = spread(case, row, "torn")
    if torn is None:
        return "-"
    return "yes" if torn.high == 0 else f"NO ({torn.high:.0f} torn)"


def _limit(name: str, found: Spread, nbytes: int | None) -> str:
    speed = "" if nbytes is None or name == "fork" else f"  {nbytes / 1e9 / found.median:6.2f} GB/s"
    return f"{LIMITS[:-1]} {name:<18}{_cell(found, 1, 4):>28} s{speed}"
