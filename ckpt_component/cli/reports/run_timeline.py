"""The trace as a picture: around each of the last saves, what training and the writer did at the same time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ..output import counted
from .page import without_frame
from .run_records import Run, Save
from .run_trace import TRACKS, slices_of
from .text import duration

#: Kind of a slice -> its colour.
_COLOURS = {"step": "#d5dbe3", "wait": "#c0392b", "plan": "#e8b98f", "memory": "#b99ac9", "stage": "#d08c60"}
_COLOURS |= {"write": "#1b6ca8", "sync": "#6aa5cf", "vote": "#a9cba4", "commit": "#5a8f5a"}
_TRACKS = [track for track in TRACKS if track != "loads"]
_MAX_RANKS, _LAST = 4, 3


def height(run: Run) -> float:
    """The height that `draw_saves` needs, in inches."""
    return 0.9 + max(len(run.saves()[-_LAST:]), 1) * (0.6 + 0.26 * len(_TRACKS) * min(len(run.ranks), _MAX_RANKS))


def draw_saves(figure: Any, run: Run) -> None:
    """Draw the last saves of the first ranks into a figure or a subfigure."""
    saves = run.saves()[-_LAST:]
    axes = figure.subplots(max(len(saves), 1), squeeze=False)[:, 0]
    if not saves:
        axes[0].set_axis_off()
        axes[0].text(0.5, 0.5, "no saves yet", ha="center")
        return
    logs = [log for _, log in sorted(run.ranks.items())][:_MAX_RANKS]
    rows = [f"rank {log.rank} {track}" for log in logs for track in _TRACKS]
    slices = [(f"rank {log.rank} {part.track}", part) for log in logs for part in slices_of(log)]
    for axis, ranks in zip(axes, saves, strict=True):
        began, ended = min(save.time for save in ranks), max(save.end for save in ranks)
        margin = 0.12 * (ended - began)
        bars: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for row, part in slices:
            if row in rows and part.end > began - margin and part.begin < ended + margin:
                bars[row, part.kind].append((part.begin - began, part.end - part.begin))
        for (row, kind), spans in bars.items():
            place, gap = (rows.index(row) - 0.4, 0.8), 0.5 if len(spans) < 200 else 0.0
            axis.broken_barh(spans, place, color=_COLOURS[kind], edgecolor="white", linewidth=gap)
        axis.set_xlim(-margin, ended - began + margin)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_yticks(range(len(rows)), rows)
        axis.set_title(_title(run, ranks), loc="left", fontsize=9)
        without_frame(axis)
    axes[-1].set_xlabel("seconds since the save was called", fontsize=8)
    _legend(figure)


def _title(run: Run, ranks: Sequence[Save]) -> str:
    save = max(ranks, key=lambda save: save.seconds)
    waits, seconds = duration(max(each.stall_s for each in ranks)), duration(save.seconds)
    if save.outcome != "committed":
        return f"save of step {save.step}: {save.outcome} after {seconds}; training waits {waits}"
    steps = sum(save.time < step.begin and step.end <= save.end for step in run.leader.steps())
    return f"save of step {save.step}: training waits {waits}; durable after {seconds}, {counted(steps, 'step')} later"


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch  # type: ignore[import-not-found,unused-ignore]

    texts = {"step": "a training step", "wait": "training waits"}
    handles = [Patch(color=colour, label=texts.get(kind, kind)) for kind, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=7, frameon=False)
