"""A Chrome trace of a run, for Perfetto and chrome://tracing.

Every rank is a process, and what happens at the same time in it is a thread: steps and waits of training, the stager,
the writer, the commit, loads. Both viewers colour a slice by a hash of its name; Perfetto ignores `cname`. So a name is
that of a phase, without the number of the step, which is in the details.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
