"""The report of the runs of a folder: lines and tables, and with the extra `plot` a picture and a page."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...core.storage.space import amount, rate
from ..output import Element, Table, clock_text, counted, duration, wait_text
from .page import new_figure, without_frame, write_page
from .replaced import replaced
from .run_records import RankLog, RecordedSave, Run

#: Thread -> the phases of a save that it shows.
TRACKS = {
    "training": (),
    "stager": ("plan", "memory", "stage"),
    "writer": ("write", "sync"),
    "commit": ("vote", "commit"),
    "loads": (),
}


@dataclass(frozen=True)
class Slice:
    """Something that a rank did.

    Attributes:
        track: the thread of `TRACKS`
        kind: `step`, `wait`, `load`, or a phase of a save
        step: the number of the training step
        begin: seconds since 1970
        end: seconds since 1970
        details: shown for the slice
    """

    track: str
    kind: str
    step: int | None
    begin: float
    end: float
    details: dict[str, Any]


def slices_of(log: RankLog) -> Iterator[Slice]:
    """All that one rank did, track by track in the order of time."""
    for step in log.steps():
        yield Slice("training", "step", step.number, step.begin, step.end, {})
    for save in log.saves:
        details = _details(save)
        yield Slice("training", "wait", save.step, save.time, save.time + save.stall_s, details)
        for track, phases in TRACKS.items():
            for phase in save.spans.keys() & set(phases):
                begin, end = save.spans[phase]
                yield Slice(track, phase, save.step, save.time + begin, save.time + end, details)
    for load in log.loads:
        details = {"path": load.path, "bytes": load.bytes, "verified": load.verified, "error": load.error}
        yield Slice("loads", "load", load.step, load.time, load.time + load.seconds, details)


def write_trace(path: Path, run: Run, since: float) -> None:
    """Write a trace file of a run with what ended after `since`, in seconds since 1970."""
    with replaced(path) as file:
        file.write('{"displayTimeUnit": "ms",\n"traceEvents": [')
        separator = "\n"
        for rank, log in sorted(run.ranks.items()):
            for event in _of_rank(log, since, run.began):
                file.write(separator + json.dumps({**event, "pid": rank}, allow_nan=False))
                separator = ",\n"
        file.write("\n]}\n")


def _of_rank(log: RankLog, since: float, origin: float) -> Iterator[dict[str, Any]]:
    where = f" ({log.host}, pid {log.pid})" if log.host else ""
    yield {"ph": "M", "name": "process_name", "tid": 0, "args": {"name": f"rank {log.rank}{where}"}}
    threads = {track: number for number, track in enumerate(TRACKS, 1)}
    for track, thread in threads.items():
        yield {"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": track}}
    for part in slices_of(log):
        if part.end >= since:
            yield {
                "ph": "X",
                "name": "training waits" if part.kind == "wait" else part.kind,
                "cat": part.kind,
                "ts": round((part.begin - origin) * 1e6, 1),
                "dur": round(max(part.end - part.begin, 0) * 1e6, 1),
                "tid": threads[part.track],
                "args": {"step": part.step, **part.details},
            }


def _details(save: RecordedSave) -> dict[str, Any]:
    names = ("path", "outcome", "error", "bytes", "reused", "attempts", "stall_s", "lost_s")
    write_s = save.phase_s("write", "sync")
    rate = {"GB/s": round(save.bytes / 1e9 / write_s, 3)} if write_s else {}
    return {**{name: getattr(save, name) for name in names}, **rate}


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


#: Where a load was from, if not from the disk.
_SOURCES = {"memory": " from memory", "peer": " from peers"}
#: A wait may end so long after its deadline.
_GRACE_SECONDS = 5.0
#: Saves that the text shows, the last ones.
_SHOWN = 15
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
#: Columns that make way in this order where lines would be too long; `--json` has them.
_SPARED = ("queue", "sync", "commit", "rate", "stage", "reused")
_MEANING = (
    "stall: training waited; stage: planned and copied to memory; queue: waited for memory and the writer; write, "
    "sync: to the disk; commit: ranks agreed and it became visible; durable: from the call to the end; lost: stall and "
    "slower steps. Columns that do not fit are left out; --json has them"
)


def blocks(
    folder: Path, figures: Sequence[Mapping[str, Any]], shown: int = -1, limit: int | None = _SHOWN
) -> Iterator[Element]:
    """The lines and tables of the report.

    Args:
        folder: the folder of the checkpoints
        figures: the figures of its runs, the oldest first
        shown: index of the run to describe
        limit: how many saves to show, the last ones; None: all
    """
    yield from _about(folder, figures[shown])
    saves = [save for run in figures for save in run["saves"]]
    yield ""
    if len(figures) > 1:
        yield _runs_table(figures)
        yield f"above: run {range(1, len(figures) + 1)[shown]} of {len(figures)}; --run N shows another"
        yield ""
    if not saves:
        yield "no saves yet"
        return
    listed = saves if limit is None else saves[-limit:]
    yield _saves_table(listed)
    if len(listed) < len(saves):
        yield f"the last {len(listed)} of {len(saves)} saves; --json has all"
    yield _MEANING
    if any(save["reused"] for save in listed):
        yield "reused: not written, because an earlier checkpoint has the same files"
    for save in listed:
        if save["error"] is not None:
            yield f"step {save['step']} {save['outcome']}: {save['error']}"


def _about(folder: Path, run: Mapping[str, Any]) -> Iterator[str]:
    hosts = f" on {', '.join(run['hosts'][:3])}{' ...' if len(run['hosts']) > 3 else ''}" if run["hosts"] else ""
    preset = f", {run['preset']}" if run["preset"] else ""
    ranks = counted(run["world_size"], "rank")
    age = duration(max(time.time() - run["ended"], 0))
    yield f"{folder}: {ranks}{hosts}{preset}, from {clock_text(run['began'])}; last event {age} ago"
    if run["first_step"] is not None:
        pace = "" if run["step_s"] is None else f", median {duration(run['step_s'])}"
        yield f"steps {run['first_step']} to {run['last_step']}{pace}"
    if run["kept"] is not None:
        slower = max(run["lost_s"] - run["stall_s"], 0)
        yield (
            f"training kept {_percent(run['kept'])} of {duration(run['training_s'])}: saves cost "
            f"{duration(run['lost_s'])} (waits {duration(run['stall_s'])}, slower steps {duration(slower)})"
        )
    counts = [f"{run['committed']} committed"]
    counts += [f"{run[name]} {name}" for name in ("failed", "skipped", "retried") if run[name]]
    written = f", {amount(run['bytes'])} at {rate(run['gbps'] * 1e9)}" if run["gbps"] else ""
    reused = f", {amount(run['reused'])} reused" if run["reused"] else ""
    yield f"saves: {', '.join(counts)}{written}{reused}"
    yield from _waits(run["waits"])
    yield from _snapshots(run["in_memory"])
    yield from _peers(run["at_peers"])
    yield from _uploads(run["uploads"])
    yield from _published(run["published"])
    for load in run["loads"]:
        if load["error"] is not None:
            yield f"load of {load['path']} failed: {load['error']}"
        else:
            verified = "verified" if load["verified"] else "not verified"
            size, source = amount(load["bytes"]), _SOURCES.get(load["source"], "")
            yield f"loaded step {load['step']}{source}: {size} in {duration(load['seconds'])}, {verified}"


def _waits(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of waits that last longer than usual. One whose deadline is over has ended, and so has its process."""
    for wait in found:
        if wait["until"] is None or wait["until"] > time.time() - _GRACE_SECONDS:
            yield f"rank {wait['rank']} {wait_text(wait)}"


def _peers(found: Mapping[str, Any] | None) -> Iterator[str]:
    """Of the snapshots that were at their peers."""
    if found is not None:
        seconds, size = duration(found["at_peers_s"]), amount(found["sent"])
        newest = f"the last: step {found['step']}"
        yield f"at their peers: {found['arrived']}, {newest}; {seconds} after the save, {size} received by rank 0"


def _snapshots(found: Mapping[str, Any] | None) -> Iterator[str]:
    """Of the saves to memory alone."""
    if found is None:
        return
    failed = f", {found['failed']} failed or skipped" if found["failed"] else ""
    after = "" if found["whole_s"] is None else f", whole after {duration(found['whole_s'])}"
    stall = f"stall {duration(found['stall_s'])}{after} (medians)"
    yield f"in memory alone: {counted(found['whole'], 'snapshot')}{failed}; {stall}"
    for error in found["errors"][:_SHOWN]:
        yield f"not kept in memory: {error}"


def _uploads(uploads: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    done = [each for each in uploads if each["error"] is None]
    failed = [each for each in uploads if each["error"] is not None]
    if done:
        last, lag = done[-1], f"{done[-1]['lag_steps']} steps behind"
        size, seconds = amount(sum(each["bytes"] for each in done)), duration(sum(each["seconds"] for each in done))
        yield f"uploads: {len(done)}, {size} in {seconds}; the last: step {last['step']}, then {lag}"
    for each in failed[-_SHOWN:]:
        of_step = "" if each["step"] is None else f" of step {each['step']}"
        yield f"upload{of_step} failed: {each['error']}"


def _published(found: Mapping[str, Any] | None) -> Iterator[str]:
    """Of the versions for inference."""
    if found is None:
        return
    if found["versions"]:
        skipped = f", {counted(found['skipped'], 'checkpoint')} skipped" if found["skipped"] else ""
        size, whole = amount(found["bytes"]), amount(found["whole_bytes"])
        times = f"{duration(found['seconds'])} each, {duration(found['lag'])} after the commit (medians)"
        yield (
            f"published: {counted(found['versions'], 'version')}, {found['whole']} whole, {size} for {whole}; {times}; "
            f"the last: version {found['version']}, step {found['step']}{skipped}"
        )
    for error in found["errors"][:_SHOWN]:
        yield f"not published: {error}"


def _saves_table(saves: Sequence[Mapping[str, Any]]) -> Table:
    is_reusing = any(save["reused"] for save in saves)
    sizes = ["written", "reused"] if is_reusing else ["size"]
    lines = [["step", "outcome", *sizes, "rate", *_COLUMNS]]
    for save in saves:
        written = "-" if save["gbps"] is None else rate(save["gbps"] * 1e9)
        known = [[save[key] for key in keys if save[key] is not None] for keys in _COLUMNS.values()]
        times = [duration(sum(seconds)) if seconds else "-" for seconds in known]
        reused = [amount(save["reused"])] * is_reusing
        lines.append([str(save["step"]), save["outcome"], amount(save["bytes"]), *reused, written, *times])
    return Table(lines, left=(1,), spared=_SPARED)


def _runs_table(figures: Sequence[Mapping[str, Any]]) -> Table:
    lines = [["run", "from", "ran for", "steps", "saves", "failed", "kept"]]
    for number, run in enumerate(figures, 1):
        steps = "-" if run["first_step"] is None else f"{run['first_step']} to {run['last_step']}"
        kept = "-" if run["kept"] is None else _percent(run["kept"])
        times = clock_text(run["began"]), duration(run["ended"] - run["began"])
        lines.append([str(number), *times, steps, str(run["committed"]), str(run["failed"]), kept])
    return Table(lines, left=())


def write_files(
    runs: Sequence[Run], folder: Path, figures: Sequence[Mapping[str, Any]], shown: int, out: Path
) -> list[Path]:
    """Write the picture and the page of a run, if matplotlib is installed.

    Args:
        runs: the runs of the folder
        folder: as for `blocks`
        figures: as for `blocks`
        shown: as for `blocks`
        out: where to

    Raises:
        OSError: a file cannot be written
    """
    caption, draw = "The last saves, with what training did beside them.", partial(picture_of, runs[shown])
    return write_page(out / "run", draw, "Run", str(folder), caption, blocks(folder, figures, shown, None))


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
