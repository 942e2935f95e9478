"""What the figures of several hosts come to: a table, verdicts, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from ckpt_component.cli.output import Table
from ckpt_component.cli.reports.page import new_figure, without_frame

from ..child import Run
from ..presentation import Presentation
from ..task import ERROR
from ..verdicts import Measured, Missing, Verdict, at_least, at_most
from .host_rows import COPIES, ratios

#: A copy has this part of the speed of a plain stream; a load takes so many times what reading once takes; and steps
#: beside a copy are so many times as long.
_COPY_BOUND, _READ_BOUND, _STEP_BOUND = 0.8, 1.2, 1.05

LEGEND = """stream: seconds of all bytes over a plain TCP connection, between the same two processes
copy: of a snapshot to its peer, verified; first: into memory that is new
step x: CPU time of a training step, on a core of its own, beside copies, over that without
read once: seconds of a load of all hosts, of which each wants everything; least: size over rate of the storage
x: over the figure before it, turn by turn, the median; CPU: seconds of all processes together"""


def hosts_shown(measured: Mapping[str, Run]) -> Presentation:
    """What the figures come to, judged."""
    shares = {row: found for row, run in measured.items() if (found := _ratio_of(row, run))}
    return Presentation(
        "ckpt-bench hosts",
        "hosts",
        [_table(measured)],
        LEGEND,
        [verdict for row, run in measured.items() for verdict in _verdicts(row, run)],
        "Copies over a plain stream, and loads over reading once; each turn.",
        partial(_picture, shares) if shares else None,
    )


def _ratio_of(row: str, run: Run) -> list[float]:
    return ratios(run, "copy", "stream") if row == COPIES else ratios(run, "load", "least")


def _table(measured: Mapping[str, Run]) -> str:
    lines = [["", "GB", "least or stream", "load or copy", "x", "low..high", "CPU", "first", "step x"]]
    failed = []
    for row, run in measured.items():
        found = _ratio_of(row, run)
        if found:
            before = run["least"] if "least" in run else median(run["stream"])
            first = f"{median(run['first_copy']):.2f}" if "first_copy" in run else ""
            steps = f"{median(run['step_cpu_ratio']):.2f}" if "step_cpu_ratio" in run else ""
            own = "copy" if row == COPIES else "load"
            spread = f"{min(found):.2f}..{max(found):.2f}"
            times = [f"{before:.2f}", f"{median(run[own]):.2f}", f"{median(found):.2f}", spread]
            lines.append([row, f"{run['bytes'] / 1e9:.2f}", *times, f"{median(run[f'{own}_cpu']):.2f}", first, steps])
        if ERROR in run:
            failed.append(f"{row}: FAILED: {run[ERROR]}")
    return "\n".join(["\nseveral hosts; medians, in seconds", *Table(lines).text(), *failed])


def _verdicts(row: str, run: Run) -> list[Verdict]:
    """What is promised of a row. What is compared are medians of ratios, so below is 1."""
    if row != COPIES:
        load = _middle(run, "a load", "load", "least")
        return [at_most(f"{row}: seconds", _READ_BOUND, load, Measured("size over rate", 1.0))]
    steps: Measured | Missing = "no steps were measured"
    if run.get("step_cpu_ratio"):
        steps = Measured("beside copies", median(run["step_cpu_ratio"]))
    return [
        at_least(
            "copies: speed", _COPY_BOUND, _middle(run, "a copy", "stream", "copy"), Measured("a plain stream", 1.0)
        ),
        at_most("copies: CPU of training steps", _STEP_BOUND, steps, Measured("without", 1.0)),
    ]


def _middle(run: Run, name: str, above: str, below: str) -> Measured | Missing:
    found = ratios(run, above, below)
    return Measured(name, median(found)) if found else f"{name} was not measured"


def _picture(shares: Mapping[str, Sequence[float]]) -> Any:
    picture = new_figure(11, 1.2 + 0.5 * len(shares))
    axis = picture.subplots()
    for place, found in enumerate(shares.values()):
        axis.plot(found, [place] * len(found), "o", markersize=4)
    axis.set_yticks(range(len(shares)), [*shares], fontsize=8)
    axis.set_xlim(left=0)
    axis.invert_yaxis()
    axis.set_xlabel("times the plain stream, or reading once")
    without_frame(axis)
    return picture
