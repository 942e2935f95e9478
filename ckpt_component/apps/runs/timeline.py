"""The trace as a picture: around each of the last saves, what training and the writer did at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..sweeps.page import new_figure, without_frame
from ..sweeps.text import duration
from .records import PHASES, Run, Save, Span
from .trace import TRACKS, Slice, slices_of

#: Kind of a slice -> its colour.
COLOURS = {
    "step": "#d5dbe3",
    "wait": "#c0392b",
    "plan": "#e8b98f",
    "memory": "#b99ac9",
    "stage": "#d08c60",
    "queue": "#c9b8d8",
    "write": "#1b6ca8",
    "sync": "#6aa5cf",
    "vote": "#a9cba4",
    "commit": "#5a8f5a",
}
_TRACKS = [track for track, phases in TRACKS.items() if phases or track == "training"]
_MAX_RANKS = 4
#: Kinds whose text is white.
_DARK = ("wait", "stage", "write", "commit")
#: A share of the width below which a slice has no text.
_LABELLED = 0.035


def draw(run: Run, path: Path, last: int) -> None:
    """Draw the last saves of a run.

    Args:
        run: The run.
        path: The PNG file.
        last: How many saves, at most.
    """
    figure = new_figure(11, height(run, last))
    draw_saves(figure, run, last)
    figure.savefig(path, dpi=110, format="png")


def height(run: Run, last: int) -> float:
    """The height that `draw_saves` needs, in inches."""
    return 0.9 + max(len(_last_saves(run, last)), 1) * (0.6 + 0.26 * len(_TRACKS) * min(len(run.ranks), _MAX_RANKS))


def draw_saves(figure: Any, run: Run, last: int) -> None:
    """Draw the last saves into a figure or a subfigure."""
    saves = _last_saves(run, last)
    axes = figure.subplots(max(len(saves), 1), squeeze=False)[:, 0]
    if not saves:
        axes[0].set_axis_off()
        axes[0].text(0.5, 0.5, "no saves yet", ha="center")
        return
    logs = [log for _, log in sorted(run.ranks.items())][:_MAX_RANKS]
    rows = len(logs) * len(_TRACKS)
    slices = [list(slices_of(log)) for log in logs]
    for axis, save in zip(axes, saves, strict=True):
        begin, end = _around(run, save)
        for number, parts in enumerate(slices):
            shown = [part for part in parts if part.track in _TRACKS and part.end > begin and part.begin < end]
            _draw_rank(axis, shown, number * len(_TRACKS), save.time, (begin, end))
        axis.set_xlim(begin - save.time, end - save.time)
        axis.set_ylim(rows - 0.5, -0.5)
        labels = [f"rank {log.rank} {track}" if len(logs) > 1 else track for log in logs for track in _TRACKS]
        axis.set_yticks(range(rows), labels)
        for line in range(len(_TRACKS), rows, len(_TRACKS)):
            axis.axhline(line - 0.5, color="#bbbbbb", linewidth=0.6)
        axis.set_title(_title(run, save), loc="left", fontsize=9)
        without_frame(axis)
        axis.tick_params(axis="y", length=0)
    which = f"; the first {len(logs)} of {len(run.ranks)} ranks" if len(logs) < len(run.ranks) else ""
    axes[-1].set_xlabel(f"seconds since the save was called{which}", fontsize=8)
    _legend(figure, {part.kind for parts in slices for part in parts})


def _last_saves(run: Run, last: int) -> list[Save]:
    return [save for save in run.leader.saves if save.spans][-last:]


def _title(run: Run, save: Save) -> str:
    over = save.time + save.seconds
    steps = sum(save.time < step.begin and step.end <= over for step in run.leader.steps())
    waits, seconds = duration(max(other.stall_s for other in _on_all_ranks(run, save))), duration(save.seconds)
    if save.outcome != "committed":
        return f"save of step {save.step}: {save.outcome} after {seconds}; training waits {waits}"
    later = f", {steps} steps later" if steps else ""
    return f"save of step {save.step}: training waits {waits}; durable after {seconds}{later}"


def _on_all_ranks(run: Run, save: Save) -> list[Save]:
    """The same save on each rank; a step may have been saved more than once."""
    return [
        other
        for log in run.ranks.values()
        for other in log.saves
        if other.path == save.path and other.time < save.time + save.seconds and other.time + other.seconds > save.time
    ] or [save]


def _around(run: Run, save: Save) -> Span:
    """The time of a save on all ranks, and some steps before and after."""
    saves = _on_all_ranks(run, save)
    begin, end = min(other.time for other in saves), max(other.time + other.seconds for other in saves)
    margin = 0.12 * (end - begin)
    return begin - margin, end + margin


def _draw_rank(axis: Any, parts: Sequence[Slice], first_row: int, origin: float, window: Span) -> None:
    width = window[1] - window[0]
    bars: dict[tuple[int, str], list[Span]] = {}
    for part in parts:
        row = first_row + _TRACKS.index(part.track)
        bars.setdefault((row, part.kind), []).append((part.begin - origin, part.end - part.begin))
        begin, end = max(part.begin, window[0]), min(part.end, window[1])
        if end - begin < _LABELLED * width:
            continue
        text = part.name.removeprefix("step ") if part.kind == "step" else part.kind
        if part.kind != "step" and end - begin > 3 * _LABELLED * width:
            text += f" {duration(part.end - part.begin)}"
        colour = "white" if part.kind in _DARK else "#333333"
        axis.text((begin + end) / 2 - origin, row, text, ha="center", va="center", fontsize=6.5, color=colour)
    for (row, kind), spans in bars.items():
        gap = 0.5 if len(spans) < 200 else 0.0
        axis.broken_barh(spans, (row - 0.4, 0.8), color=COLOURS[kind], edgecolor="white", linewidth=gap)


def _legend(figure: Any, kinds: set[str]) -> None:
    from matplotlib.patches import Patch  # type: ignore[import-not-found,unused-ignore]

    texts = {"step": "a training step", "wait": "training waits", **{phase: phase for phase in PHASES}}
    handles = [Patch(color=COLOURS[kind], label=text) for kind, text in texts.items() if kind in kinds]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=7, frameon=False)
