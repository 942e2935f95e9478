"""Format the figures of one state on one target as a table."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_component.cli.text import Table

from .measure.row_kinds import LIMITS, ROWS
from .row_figures import Spread, fact, limits_of, spread, why_not
from .runs import Case

#: Column -> figure, factor, digits.
_COLUMNS: Sequence[tuple[str, str, float, int]] = (
    ("first stall", "first_stall", 1, 3),
    ("stall", "stall", 1, 3),
    ("staged", "staged", 1, 3),
    ("complete", "complete", 1, 2),
    ("durable", "durable", 1, 2),
    ("lost", "lost", 1, 3),
    ("its CPU", "lost_cpu", 1, 3),
    ("queued", "lost_queue", 1, 3),
    ("step x", "step_ratio", 1, 2),
    ("next 10 x", "next_steps", 1, 2),
    ("memory GB", "memory", 1e-9, 2),
    ("device GB", "device_memory", 1e-9, 2),
    ("GB", "bytes", 1e-9, 2),
    ("files", "files", 1, 0),
    ("load warm", "load_warm", 1, 2),
    ("load cold", "load_cold", 1, 2),
)

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
    lines = [["", *(name for name, *_ in _COLUMNS), "whole"]]
    notes = []
    for row in case.rows:
        reason = why_not(case, row)
        if reason is not None:
            notes.append(f"{row}: {reason}")
        if row in ROWS and spread(case, row, "durable") is not None:
            cells = [_cell(spread(case, row, figure), factor, digits) for _, figure, factor, digits in _COLUMNS]
            lines.append([row, *cells, _whole(case, row)])
    text = [f"\n{case.state} on {case.target}{size}"]
    if len(lines) > 1:
        text += Table(lines).text()
    text += notes
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
