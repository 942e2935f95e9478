"""The report of the runs of a folder: text, `run.csv`, and with the extra `plot` a picture and a page."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...storage.space import amount
from ..sweeps.page import can_plot, new_figure, without_frame, write_page
from ..sweeps.replaced import write_csv
from ..sweeps.text import aligned, duration
from .records import Run
from .timeline import draw_saves, height

#: The files are `run.csv`, `run.png` and `run.html`.
_NAME = "run"
#: Saves that the text shows, the last ones.
_SHOWN = 15
#: Steps that the picture shows one by one; of more, the slowest of several each.
_POINTS = 1500
#: Column -> the times of a save that it shows together.
_COLUMNS = {
    "stall": ("stall_s",),
    "stage": ("plan_s", "stage_s"),
    "queue": ("memory_s", "queue_s"),
    "write": ("write_s",),
    "sync": ("sync_s",),
    "commit": ("vote_s", "commit_s"),
    "durable": ("durable_s",),
    "lost": ("lost_s",),
}
_MEANING = (
    "stall: training waited; stage: planned and copied to memory; queue: waited for memory and the writer; write, "
    "sync: to the disk; commit: ranks agreed and it became visible; durable: from the call to the end; lost: stall and "
    "slower steps"
)


def text(folder: Path, figures: Sequence[Mapping[str, Any]], limit: int | None = _SHOWN) -> Iterator[str]:
    """The lines of the report.

    Args:
        folder: The folder of the checkpoints.
        figures: The figures of its runs, the oldest first.
        limit: How many saves to show, the last ones; None: all.
    """
    newest = figures[-1]
    yield from _about(folder, newest)
    saves = [save for run in figures for save in run["saves"]]
    if len(figures) > 1:
        yield ""
        yield from _runs_table(figures)
    if saves:
        shown = saves if limit is None else saves[-limit:]
        yield ""
        yield from _saves_table(shown)
        if len(shown) < len(saves):
            yield f"the last {len(shown)} of {len(saves)} saves; run.csv and --json have all"
        yield from textwrap.wrap(_MEANING, 100)
    else:
        yield "no saves yet"
    problems = [save for save in saves if save["error"] is not None]
    if problems:
        yield ""
    for save in problems[-_SHOWN:]:
        yield from _wrapped(f"step {save['step']} {save['outcome']}: {save['error']}")


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 100, subsequent_indent="  ")


def _about(folder: Path, run: Mapping[str, Any]) -> Iterator[str]:
    preset = f", {run['preset']}" if run["preset"] else ""
    hosts = f" on {', '.join(run['hosts'][:3])}{' ...' if len(run['hosts']) > 3 else ''}" if run["hosts"] else ""
    age = _long(max(time.time() - run["ended"], 0)) if time.time() - run["ended"] < 600 else None
    ended = f"; last event {age} ago" if age else f", until {_clock(run['ended'])}"
    yield f"{folder}: {run['world_size']} rank(s){hosts}{preset}, from {_clock(run['began'])}{ended}"
    if run["first_step"] is not None:
        pace = ""
        if run["step_s"] is not None:
            pace = f", {duration(run['step_s'])} each"
            if run["step_saving_s"] is not None:
                pace += f", {duration(run['step_saving_s'])} during a save"
        yield f"steps {run['first_step']} to {run['last_step']}{pace}"
    if run["kept"] is not None:
        slower = max(run["lost_s"] - run["stall_s"], 0)
        yield (
            f"training kept {100 * run['kept']:.2f} % of {_long(run['training_s'])}: saves cost "
            f"{duration(run['lost_s'])} (waits {duration(run['stall_s'])}, slower steps {duration(slower)})"
        )
    counts = [f"{run['committed']} committed"]
    counts += [f"{run[name]} {name}" for name in ("failed", "skipped", "retried") if run[name]]
    rate = f", {amount(run['bytes'])} at {run['gbps']:.2f} GB/s" if run["gbps"] else ""
    yield f"saves: {', '.join(counts)}{rate}"
    if run["other"]:
        counts = [f"{count} {kind}{'d' if kind.endswith('e') else 'ed'}" for kind, count in run["other"].items()]
        yield f"checkpoints: {', '.join(counts)}"
    for load in run["loads"]:
        if load["error"] is not None:
            yield from _wrapped(f"load of {load['path']} failed: {load['error']}")
            continue
        rate = f" ({load['gbps']:.2f} GB/s)" if load["gbps"] else ""
        verified = "verified" if load["verified"] else "not verified"
        yield f"loaded step {load['step']}: {amount(load['bytes'])} in {duration(load['seconds'])}{rate}, {verified}"


def _saves_table(saves: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [["step", "outcome", "size", "GB/s", *_COLUMNS, "tries"]]
    for save in saves:
        rate = "-" if save["gbps"] is None else f"{save['gbps']:.2f}"
        known = [[save[key] for key in keys if save[key] is not None] for keys in _COLUMNS.values()]
        times = [duration(sum(seconds)) if seconds else "-" for seconds in known]
        size = amount(save["bytes"]) if save["bytes"] else "-"
        lines.append([str(save["step"]), save["outcome"], size, rate, *times, str(save["attempts"])])
    if all(save["attempts"] == 1 for save in saves):
        lines = [line[:-1] for line in lines]
    return aligned(lines, left=(1,))


def _runs_table(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [["run", "from", "ran for", "idle before", "steps", "repeated", "saves", "failed", "kept"]]
    for number, run in enumerate(figures, 1):
        lines.append(
            [
                str(number),
                _clock(run["began"]),
                _long(run["ended"] - run["began"]),
                "-" if run["idle_s"] is None else _long(run["idle_s"]),
                "-" if run["first_step"] is None else f"{run['first_step']} to {run['last_step']}",
                "-" if run["repeated_steps"] is None else str(run["repeated_steps"]),
                str(run["committed"]),
                str(run["failed"]),
                "-" if run["kept"] is None else f"{100 * run['kept']:.2f} %",
            ]
        )
    return aligned(lines, left=())


def write_files(runs: Sequence[Run], folder: Path, figures: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
    """Write `run.csv` with all saves, and if matplotlib is installed the picture and the page of the newest run.

    Args:
        runs: The runs of the folder.
        folder: As for `text`.
        figures: As for `text`.
        out: Where to.

    Raises:
        OSError: A file cannot be written.
    """
    base = out / _NAME
    records = [{"run": number, **save} for number, run in enumerate(figures, 1) for save in run["saves"]]
    columns = list(dict.fromkeys(key for record in records for key in record)) or ["run"]
    write_csv(base.with_suffix(".csv"), columns, records)
    files = [base.with_suffix(".csv")]
    if can_plot():
        caption = "How long steps took, with the saves; and the last saves, with what training did meanwhile."
        blocks = ["\n".join(text(folder, figures, None))]
        files += write_page(base, _picture(runs[-1]), "Run", str(folder), caption, blocks)
    return files


def _picture(run: Run) -> Any:
    tall = height(run, 3)
    figure = new_figure(11, 2.4 + tall)
    top, bottom = figure.subfigures(2, height_ratios=[2.4, tall])
    _draw_steps(top.subplots(), run)
    draw_saves(bottom, run, 3)
    return figure


def _draw_steps(axis: Any, run: Run) -> None:
    """The duration of steps over their numbers, and the saves as lines."""
    steps = list(run.leader.steps())
    size = -(-len(steps) // _POINTS) or 1
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    slowest = [max((step.end - step.begin) * 1e3 for step in group) for group in groups]
    axis.plot([group[-1].number for group in groups], slowest, color="#5b6b7b", linewidth=0.8)
    for save in run.leader.saves[-_POINTS:]:
        if save.step is not None:
            axis.axvline(save.step, color="#1b6ca8" if save.error is None else "#c0392b", linewidth=0.6, alpha=0.6)
    each = "" if size == 1 else f", the slowest of {size}"
    axis.set_title(f"duration of a step{each}, without waits; lines: saves (red: failed)", loc="left", fontsize=9)
    axis.set_ylabel("ms", fontsize=8)
    axis.set_xlabel("step", fontsize=8)
    if slowest:
        axis.set_ylim(0, 1.1 * sorted(slowest)[int(0.99 * (len(slowest) - 1))] * 1.3)
    without_frame(axis)


def _long(seconds: float) -> str:
    """A duration of any length."""
    for unit, length in (("d", 172800), ("h", 7200), ("min", 120)):
        if seconds >= length:
            return f"{2 * seconds / length:.1f} {unit}"
    return duration(seconds)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
