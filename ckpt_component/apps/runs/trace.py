"""A Chrome trace of a run, for Perfetto and chrome://tracing.

Every rank is a process, and what goes on at the same time in it is a thread: steps and waits of training, the stager,
the writer, the commit, loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..sweeps.replaced import replaced
from .records import Load, RankLog, Run, Save, Span

#: Thread -> the phases of a save that it shows.
TRACKS = {
    "training": (),
    "stager": ("plan", "memory", "stage"),
    "queue": ("queue",),
    "writer": ("write", "sync"),
    "commit": ("vote", "commit"),
    "loads": (),
}


#: Seconds by which slices that follow each other may overlap, because times are rounded.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Slice:
    """Something that a rank did.

    Attributes:
        track: The thread of `TRACKS`.
        kind: `step`, `wait`, `load`, or a phase of a save.
        begin: Seconds since 1970.
        end: Seconds since 1970.
        details: Shown for the slice.
    """

    track: str
    name: str
    kind: str
    begin: float
    end: float
    details: dict[str, Any] = field(default_factory=dict)


def slices_of(log: RankLog) -> Iterator[Slice]:
    """All that one rank did, track by track in the order of time."""
    for step in log.steps():
        yield Slice("training", f"step {step.number}", "step", step.begin, step.end)
    for save in log.saves:
        name, details = f"save {save.step}", _details(save)
        yield Slice("training", f"{name}: training waits", "wait", save.time, save.time + save.stall_s, details)
        for track, phases in TRACKS.items():
            for phase in phases:
                if phase in save.spans:
                    begin, end = save.spans[phase]
                    yield Slice(track, f"{phase} {save.step}", phase, save.time + begin, save.time + end, details)
    for load in log.loads:
        yield Slice("loads", f"load {load.step}", "load", load.time, load.time + load.seconds, _load_details(load))
        for phase, (begin, end) in load.spans.items():
            yield Slice("loads", phase, "load", load.time + begin, load.time + end)


def trace_events(runs: Sequence[Run], window: Span | None = None) -> Iterator[dict[str, Any]]:
    """The events of a trace.

    Args:
        runs: What to show. Each rank of each run is a process.
        window: Only what began within these times, in seconds since 1970.
    """
    start = min(run.began for run in runs) if window is None else window[0]
    process = 0
    for number, run in enumerate(runs, 1):
        for rank, log in sorted(run.ranks.items()):
            name = f"rank {rank}" if len(runs) == 1 else f"run {number}, rank {rank}"
            where = f" ({log.host}, pid {log.pid})" if log.host else ""
            yield from _named("process", process, 0, f"{name}{where}", process)
            yield from _of_rank(log, process, start, window)
            process += 1


def write_trace(path: Path, runs: Sequence[Run], window: Span | None = None) -> int:
    """Write a trace file; returns the number of its events. The arguments are as for `trace_events`."""
    count = 0
    with replaced(path) as file:
        file.write('{"displayTimeUnit": "ms",\n"traceEvents": [')
        for count, event in enumerate(trace_events(runs, window), 1):
            file.write("\n" if count == 1 else ",\n")
            file.write(json.dumps(event, allow_nan=False))
        file.write("\n]}\n")
    return count


def _of_rank(log: RankLog, process: int, start: float, window: Span | None) -> Iterator[dict[str, Any]]:
    threads: dict[tuple[str, int], int] = {}
    lanes: dict[str, list[list[float]]] = {}
    order = list(TRACKS)
    for part in sorted(slices_of(log), key=lambda part: (part.begin, -part.end)):
        if window is not None and not window[0] <= part.begin <= window[1]:
            continue
        lane = _lane(lanes.setdefault(part.track, []), part)
        if (part.track, lane) not in threads:
            thread = threads[part.track, lane] = order.index(part.track) * 100 + lane + 1
            title = part.track if lane == 0 else f"{part.track} {lane + 1}"
            yield from _named("thread", process, thread, title, thread)
        yield {
            "ph": "X",
            "name": part.name,
            "cat": part.kind,
            "ts": round((part.begin - start) * 1e6, 1),
            "dur": round(max(part.end - part.begin, 0) * 1e6, 1),
            "pid": process,
            "tid": threads[part.track, lane],
            "args": part.details,
        }
    moments: list[tuple[float, str, str, dict[str, Any]]]
    moments = [(when, f"{kind} {step}", "note", {}) for when, kind, step in log.notes]
    for save in log.saves:
        if save.error is not None:
            text = f"save {save.step} {save.outcome}"
            moments.append((save.time + save.seconds, text, "failure", {"error": save.error}))
    for when, text, kind, details in moments:
        if threads and (window is None or window[0] <= when <= window[1]):
            yield {
                "ph": "i",
                "s": "p",
                "name": text,
                "cat": kind,
                "ts": round((when - start) * 1e6, 1),
                "pid": process,
                "tid": min(threads.values()),
                "args": details,
            }


def _lane(lanes: list[list[float]], part: Slice) -> int:
    """The first thread of a track where a slice is after the others, or inside of one: they must not overlap in part.

    Args:
        lanes: For each thread, the ends of the slices that the last one is inside of.
        part: The slice; none before it began later.
    """
    for number, ends in enumerate(lanes):
        while ends and ends[-1] <= part.begin + _TOLERANCE:
            ends.pop()
        if not ends or part.end <= ends[-1]:
            ends.append(part.end)
            return number
    lanes.append([part.end])
    return len(lanes) - 1


def _named(kind: str, process: int, thread: int, name: str, order: int) -> Iterator[dict[str, Any]]:
    """Name and place a process or a thread."""
    for what, value in (("name", name), ("sort_index", order)):
        yield {"ph": "M", "name": f"{kind}_{what}", "pid": process, "tid": thread, "args": {what: value}}


def _details(save: Save) -> dict[str, Any]:
    rate = save.nbytes / 1e9 / write if (write := save.phase_s("write", "sync")) else None
    details = {
        "path": save.path,
        "outcome": save.outcome,
        "bytes": save.nbytes,
        "GB/s": None if rate is None else round(rate, 3),
        "stall_s": save.stall_s,
        "lost_s": save.lost_s,
        "attempts": save.attempts,
        "error": save.error,
    }
    return {name: value for name, value in details.items() if value is not None}


def _load_details(load: Load) -> dict[str, Any]:
    failed = {} if load.error is None else {"error": load.error}
    return {"path": load.path, "bytes": load.nbytes, "verified": load.verified, **failed}
