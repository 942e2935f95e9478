"""What the restarts of a run come to: their tables, verdicts, and a picture of the chains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ckpt_component.cli.output import Table
from ckpt_component.cli.reports.page import new_figure, without_frame

from ..presentation import Presentation
from ..verdicts import Measured, Missing, Verdict, at_most
from .restart_rows import MEMORY, META
from .restarts import COSTS, FIGURES, Middle, Restarts, cost, failures, figure, phases_of

#: The next step comes within this multiple of a restart that has nothing to restore.
_TOTAL_BOUND = 1.2
#: With a model on the meta device, which is not initialised.
_META_BOUND = 1.0
#: A restore from memory takes at most so many copies of the state, and so many seconds for the rest.
_COPIES_BOUND, _REST_SECONDS = 2.5, 0.2

LEGEND = "\n".join(f"{name}: {text}" for name, text in FIGURES.items())


def restarts_shown(measured: Sequence[Restarts]) -> Presentation:
    """What the restarts come to, judged."""
    drawn = [(each, row) for each in measured for row in each.rows if phases_of(each, row)]
    return Presentation(
        "ckpt-bench recovery",
        "recovery",
        [render_restarts(each) for each in measured],
        LEGEND,
        [verdict for each in measured for verdict in _verdicts(each)],
        "Seconds from SIGKILL to the end of the first optimizer step, by phase; medians.",
        partial(_picture, drawn) if drawn else None,
    )


def render_restarts(restarts: Restarts) -> str:
    """The table of one number of ranks: a line for every row; then what snapshots cost, and what failed."""
    lines = [["", *FIGURES]]
    for row in restarts.rows:
        cells = [_cell(figure(restarts, row, name), "g" if name == "repeated" else ".2f") for name in FIGURES]
        if phases_of(restarts, row):
            lines.append([row, *cells])
    title = f"\nrestarts of {restarts.ranks} rank{'s' * (restarts.ranks > 1)}, killed by SIGKILL; medians, in seconds"
    return "\n".join([title, *Table(lines).text(), *_costs(restarts), *failures(restarts)])


def _cell(middle: Middle | None, form: str) -> str:
    return "-" if middle is None else format(middle.median, form)


def _costs(restarts: Restarts) -> list[str]:
    found = {name: cost(restarts, name) for name in COSTS}
    middles = {name: middle.median for name, middle in found.items() if middle is not None}
    lost = found["lost"]
    if lost is None or len(middles) < len(COSTS):
        return []
    return [
        "a snapshot in memory costs {lost:.3f} s of training ({low:.3f}..{high:.3f}): its call takes {stall:.3f}, "
        "staging {staging:.3f} of it".format(**middles, low=lost.low, high=lost.high),
        "a step without snapshots takes {step:.3f} s, give or take {noise:.3f}".format(**middles),
    ]


def _verdicts(restarts: Restarts) -> list[Verdict]:
    """What is promised of memory."""
    verdicts: list[Verdict] = []
    ranks = f"{restarts.ranks} rank{'s' * (restarts.ranks > 1)}"
    rows = ((MEMORY, "the next step from memory", _TOTAL_BOUND), (META, "the same with a model on meta", _META_BOUND))
    for row, what, bound in rows:
        if row in restarts.rows:
            ratio = figure(restarts, row, "x_empty")
            total: Measured | Missing = "no restart from memory and from nothing was measured"
            total = total if ratio is None else Measured(row, ratio.median)
            verdicts.append(at_most(f"{ranks}: {what}", bound, total, Measured("empty", 1.0)))
    if MEMORY not in restarts.rows:
        return verdicts
    restore, times = (figure(restarts, MEMORY, name) for name in ("restore", "x_memcpy"))
    rest: Measured | Missing = "no restart from memory was measured"
    allowed = 1.0
    if restore is not None and times is not None:
        rest = Measured("restore", restore.median)
        allowed = _COPIES_BOUND * restore.median / times.median + _REST_SECONDS
    return [
        *verdicts,
        at_most(
            f"{ranks}: a restore from memory over {_COPIES_BOUND:g} copies and {_REST_SECONDS:g} s",
            1.0,
            rest,
            Measured("what is allowed", allowed),
        ),
    ]


def _picture(drawn: Sequence[tuple[Restarts, str]]) -> Any:
    picture = new_figure(11, 1.2 + 0.4 * len(drawn))
    axis = picture.subplots()
    begin = [0.0] * len(drawn)
    chains = [phases_of(each, row) for each, row in drawn]
    for phase in chains[0]:
        seconds = [chain[phase] for chain in chains]
        axis.barh(range(len(drawn)), seconds, left=begin, label=phase)
        begin = [before + here for before, here in zip(begin, seconds, strict=True)]
    axis.set_yticks(range(len(drawn)), [f"{row}, {each.ranks}" for each, row in drawn], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("s")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    without_frame(axis)
    return picture
