"""The trace as a picture: around each of the last saves, what training and the writer did at the same time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ..text import counted, duration
from .page import new_figure, without_frame
from .run_records import RankLog, RecordedSave, Run
from .run_trace import TRACKS, slices_of

#: Kind of a slice, in the order of a save -> its colour, of which phases have shades, and what it means.
_KINDS = {
    "step": ("#d5dbe3", "a training step"),
    "wait": ("#c0392b", "training waits"),
    "plan": ("#f0cfa8", "plan"),
    "memory": ("#b99ac9", "wait for memory"),
    "stage": ("#d08c60", "copy to memory (stage)"),
    "queue": ("#e9dc9a", "wait for the writer (queue)"),
    "write": ("#1b6ca8", "write"),
    "sync": ("#6aa5cf", "sync to the disk"),
    "vote": ("#a9cba4", "ranks agree (vote)"),
    "commit": ("#5a8f5a", "becomes visible (commit)"),
}
_TRACKS = [track for track in TRACKS if track != "loads"]
_MAX_RANKS, _LAST = 4, 3


def picture_of(run: Run) -> Any:
    """A figure of the last saves of the first ranks."""
    saves, logs = run.saves()[-_LAST:], [log for _, log in sorted(run.ranks.items())][:_MAX_RANKS]
    figure = new_figure(11, 0.9 + max(len(saves), 1) * (0.6 + 0.26 * len(_TRACKS) * len(logs)))
    axes = figure.subplots(max(len(saves), 1), squeeze=False)[:, 0]
    if not saves:
        axes[0].set_axis_off()
        axes[0].text(0.5, 0.5, "no saves yet", ha="center")
        return figure
    rows = [f"rank {log.rank} {track}" for log in logs for track in _TRACKS]
    bars = [bar for log in logs for bar in _bars(log)]
    occurring: set[str] = set()
    for axis, ranks in zip(axes, saves, strict=True):
        began, ended = min(save.time for save in ranks), max(save.end for save in ranks)
        margin = 0.12 * (ended - began)
        spans: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for row, kind, begin, end in bars:
            if row in rows and end > began - margin and begin < ended + margin:
                spans[row, kind].append((begin - began, end - begin))
        for (row, kind), places in spans.items():
            colour, _ = _KINDS[kind]
            # Steps stand apart; a phase of a millisecond has an edge of its own colour, which shows it at any width.
            edge = ("white" if len(places) < 200 else "none") if kind == "step" else colour
            axis.broken_barh(places, (rows.index(row) - 0.4, 0.8), color=colour, edgecolor=edge, linewidth=0.5)
            occurring.add(kind)
        axis.set_xlim(-margin, ended - began + margin)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_yticks(range(len(rows)), rows)
        axis.set_title(_title(run, ranks), loc="left", fontsize=9)
        without_frame(axis)
    axes[-1].set_xlabel("seconds since the save was called", fontsize=8)
    _legend(figure, occurring)
    return figure


def _bars(log: RankLog) -> Iterator[tuple[str, str, float, float]]:
    """Row, kind, begin and end of all that a rank did; a save in the queue waits in the row of the writer."""
    for save in log.saves:  # first, so that what is written during a save lies over it
        if "queue" in save.spans:
            begin, end = save.spans["queue"]
            yield f"rank {log.rank} writer", "queue", save.time + begin, save.time + end
    for part in slices_of(log):
        yield f"rank {log.rank} {part.track}", part.kind, part.begin, part.end


def _title(run: Run, ranks: Sequence[RecordedSave]) -> str:
    save = max(ranks, key=lambda save: save.seconds)
    waits, seconds = duration(max(each.stall_s for each in ranks)), duration(save.seconds)
    if save.outcome != "committed":
        return f"save of step {save.step}: {save.outcome} after {seconds}; training waits {waits}"
    steps = sum(save.time < step.begin and step.end <= save.end for step in run.leader.steps())
    return f"save of step {save.step}: training waits {waits}; durable after {seconds}, {counted(steps, 'step')} later"


def _legend(figure: Any, occurring: Collection[str]) -> None:
    from matplotlib.patches import Patch  # type: ignore[import-not-found,unused-ignore]

    handles = [Patch(color=colour, label=text) for kind, (colour, text) in _KINDS.items() if kind in occurring]
    figure.legend(handles=handles, loc="outside upper center", ncols=5, fontsize=7, frameon=False)
