"""The runs of a folder, from their events: per rank the steps, saves and loads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from ...errors import CheckpointConfigError, CheckpointNotFoundError, CheckpointUnreadableError
from ...events import FOLDER, LoadReport, SaveReport, checked_events

#: The phases of a save, in order.
PHASES = ("plan", "memory", "stage", "queue", "write", "sync", "vote", "commit")
#: What is known of a snapshot that was at its peers.
AT_PEERS = ("step", "bytes", "sent", "at_peers_s")
#: What is known of an upload; of one that failed its time, maybe its step, and the error.
UPLOAD = ("time", "step", "outcome", "error", "bytes", "seconds", "lag_steps")
#: What is known of a published version; of one that failed its time, step and the error.
PUBLISHED = ("time", "step", "error", "version", "whole", "bytes", "whole_bytes", "seconds", "lag", "skipped")

T = TypeVar("T", bound=SaveReport | LoadReport)


@dataclass(frozen=True)
class RecordedSave(SaveReport):
    """A save of one rank, as it was recorded."""

    rank: int = 0

    @property
    def end(self) -> float:
        """When it was committed, or had failed, in seconds since 1970."""
        return self.time + self.seconds

    def phase_s(self, *names: str) -> float | None:
        """How long these phases took together; None if none of them is known."""
        known = [self.spans[name] for name in names if name in self.spans]
        return sum(end - begin for begin, end in known) if known else None


@dataclass(frozen=True)
class Step:
    """A training step: its number, and when it began and ended, in seconds since 1970. It waits for no save."""

    number: int
    begin: float
    end: float


@dataclass
class RankLog:
    """What one rank of a run recorded; `ends` are the number and the end of each step."""

    rank: int
    host: str = ""
    pid: int | None = None
    ends: list[tuple[int, float]] = field(default_factory=list)
    saves: list[RecordedSave] = field(default_factory=list)
    at_peers: list[Mapping[str, Any]] = field(default_factory=list)
    loads: list[LoadReport] = field(default_factory=list)
    uploads: list[Mapping[str, Any]] = field(default_factory=list)
    published: list[Mapping[str, Any]] = field(default_factory=list)
    #: Waits that have not ended: for whom, and since when -> until when.
    waits: dict[tuple[str, float], float | None] = field(default_factory=dict)

    def steps(self) -> Iterator[Step]:
        """The steps whose beginning is known: the end of the step before, or of what its save made training wait."""
        resumed = {save.step: save.time + save.stall_s for save in self.saves}
        for (before, begin), (number, end) in zip(self.ends, self.ends[1:], strict=False):
            if number == before + 1:
                yield Step(number, min(max(begin, resumed.get(before, begin)), end), end)


@dataclass
class Run:
    """One run: from the start of its processes to their end.

    Attributes:
        token: identifies it
        began: when its first event was recorded, in seconds since 1970
        ended: when its last event was recorded, or its last step or save ended
    """

    token: str
    began: float
    ended: float
    world_size: int = 1
    preset: str | None = None
    ranks: dict[int, RankLog] = field(default_factory=dict)

    @property
    def leader(self) -> RankLog:
        """The log of rank 0, or of the first rank that has one."""
        return self.ranks[min(self.ranks)]

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts."""
        return sorted({log.host for log in self.ranks.values() if log.host})

    def saves(self, *, memory: bool = False) -> list[list[RecordedSave]]:
        """The saves in order, each as those of all ranks; `memory`: those to memory alone, else the others."""
        groups: dict[tuple[str, int], list[RecordedSave]] = defaultdict(list)
        for log in self.ranks.values():
            seen: Counter[str] = Counter()
            for save in (each for each in log.saves if each.memory is memory):
                groups[save.path, seen[save.path]].append(save)  # a step may be saved again after a failure
                seen[save.path] += 1
        return sorted(groups.values(), key=lambda saves: saves[0].time)

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event, one of `checked_events`."""
        # A save that was skipped has no time of its own.
        rank, when, kind = event["rank"], event["time"] or self.ended, event["event"]
        log, ended = self.ranks.setdefault(rank, RankLog(rank)), when
        if kind == "run":
            self.world_size, self.preset = event["world_size"], event.get("preset")
            log.host, log.pid = event.get("host") or "", event.get("pid")
        elif kind == "steps":
            log.ends += enumerate(event["ends"], event["first"])
            ended = max([when, *event["ends"]])
        elif kind == "save":
            log.saves.append(_report(RecordedSave, event, when))
            ended = log.saves[-1].end
        elif kind == "peers":
            log.at_peers.append({name: event.get(name) for name in AT_PEERS})
            ended = when + event["at_peers_s"]
        elif kind == "load":
            log.loads.append(_report(LoadReport, event, when))
            ended = when + log.loads[-1].seconds
        elif kind == "upload":
            log.uploads.append({name: event.get(name) for name in UPLOAD})
            ended = when + (event.get("seconds") or 0.0)
        elif kind == "publish":
            log.published.append({name: event.get(name) for name in PUBLISHED})
            ended = when + (event.get("seconds") or 0.0)
        elif kind == "wait":
            if event["ended"] is None:
                log.waits[event["for"], event["since"]] = event["until"]
            else:
                log.waits.pop((event["for"], event["since"]), None)
        self.began, self.ended = min(self.began, when), max(self.ended, ended)


def read_runs(folder: Path) -> list[Run]:
    """The runs that saved in a folder, the oldest first.

    Args:
        folder: the folder of the checkpoints

    Raises:
        CheckpointNotFoundError: it has no events; the text says what it has
        CheckpointUnreadableError: the events cannot be read
    """
    runs: dict[str, Run] = {}
    try:
        for event in checked_events(folder):
            token, when = event["run"], event["time"]
            if token not in runs:
                runs[token] = Run(token, when, when)
            runs[token].add(event)
    except OSError as error:
        raise CheckpointUnreadableError(f"The events in {folder} cannot be read: {error}.") from error
    if not runs:
        raise CheckpointNotFoundError(why_no_run(folder))
    for run in runs.values():
        for log in run.ranks.values():
            log.ends.sort(key=lambda step: step[1])
            log.saves.sort(key=lambda save: save.time)
    return sorted(runs.values(), key=lambda run: run.began)


def chosen_run(runs: Sequence[Run], number: int | None = None) -> int:
    """The index of the run to show.

    Args:
        runs: as `read_runs` returns them
        number: `--run` of the command line: counts from 1, the oldest; None: the newest run that saved, because one
            that only restored has nothing to show; if none saved, the newest

    Raises:
        CheckpointConfigError: there is no run of this number
    """
    if number is None:
        return max(
            (index for index, run in enumerate(runs) if run.saves() or run.saves(memory=True)), default=len(runs) - 1
        )
    if not 1 <= number <= len(runs):
        raise CheckpointConfigError(
            f"--run={number}: the folder has the events of {len(runs)} run(s), 1 to {len(runs)}."
        )
    return number - 1


def why_no_run(folder: Path) -> str:
    """Why a folder has no events to show, and what to type instead."""
    if not folder.is_dir():
        there = f"{folder} is a file" if folder.exists() else f"There is no folder {folder}"
        return f"{there}; give the folder with the checkpoints of a run (checkpoint.dir)."
    near = [path for path in (folder.parent, *sorted(folder.iterdir())) if (path / FOLDER).is_dir()]
    if near:
        return f"{folder} is not the folder of a run's checkpoints; type {' or '.join(map(str, near[:3]))}."
    return (
        f"{folder} has no events; runs write them with their first save, in checkpoint.local.dir if they have one, "
        "unless checkpoint.events=false. "
        f"ckpt ls {folder} lists what is there."
    )


def _report(kind: type[T], event: Mapping[str, Any], when: float) -> T:
    names = {item.name for item in fields(kind)}
    spans = {name: (begin, end) for name, (begin, end) in event["spans"].items()}
    return kind(**{**{name: event[name] for name in names & event.keys()}, "time": when, "spans": spans})


def figures_of(run: Run) -> dict[str, Any]:
    """The figures of a run, as plain data: times in seconds, points in time since 1970; None for what is not known."""
    saves, ends = [_of_all_ranks(save) for save in run.saves()], run.leader.ends
    snapshots = [_of_all_ranks(save) for save in run.saves(memory=True)]
    outcomes = Counter(save["outcome"] for save in saves)
    committed = [save for save in saves if save["outcome"] == "committed"]
    training_s = lost_s = kept = None
    if len(ends) > 1:
        first, last = ends[0][1], ends[-1][1]
        within = [save for save in (*saves, *snapshots) if first <= save["time"] <= last or save["step"] == ends[-1][0]]
        # The last step's save made training wait too.
        training_s = max([last, *(save["time"] + save["stall_s"] for save in within)]) - first
        lost_s = sum(save["lost_s"] for save in within)
        kept = max(1 - lost_s / training_s, 0.0) if training_s > 0 else None
    steps = [step.end - step.begin for step in run.leader.steps()]
    write_s = sum(save["write_s"] + (save["sync_s"] or 0) for save in committed if save["write_s"])
    nbytes = sum(save["bytes"] for save in committed)
    return {
        "run": run.token,
        "preset": run.preset,
        "world_size": run.world_size,
        "hosts": run.hosts,
        "began": run.began,
        "ended": run.ended,
        "first_step": ends[0][0] if ends else None,
        "last_step": ends[-1][0] if ends else None,
        "training_s": training_s,
        "step_s": median(steps) if steps else None,
        "lost_s": lost_s,
        "stall_s": sum(save["stall_s"] for save in (*saves, *snapshots)),
        "kept": kept,
        "committed": outcomes["committed"],
        "failed": outcomes["failed"],
        "skipped": outcomes["skipped"],
        "retried": sum(save["attempts"] > 1 for save in saves),
        "bytes": nbytes,
        "reused": sum(save["reused"] for save in committed),
        "gbps": nbytes / 1e9 / write_s if write_s else None,
        "saves": saves,
        "in_memory": _in_memory(snapshots) if snapshots else None,
        "at_peers": _at_peers(run.leader.at_peers) if run.leader.at_peers else None,
        "loads": [load.event() for load in run.leader.loads],
        "uploads": run.leader.uploads,
        "published": _published(run.leader.published) if run.leader.published else None,
        "waits": [
            {"rank": rank, "for": whom, "since": since, "until": until}
            for rank, log in sorted(run.ranks.items())
            for (whom, since), until in log.waits.items()
        ],
    }


def _in_memory(snapshots: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the saves to memory alone, of which there may be one for each step."""
    whole = [save for save in snapshots if save["outcome"] == "committed"]
    return {
        "whole": len(whole),
        "failed": len(snapshots) - len(whole),
        "stall_s": median(save["stall_s"] for save in snapshots),
        "whole_s": median(save["durable_s"] for save in whole) if whole else None,
        "errors": sorted({save["error"] for save in snapshots if save["error"] is not None}),
    }


def _at_peers(arrived: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the snapshots that were at their peers, as the leading rank has seen them."""
    return {
        "arrived": len(arrived),
        "step": arrived[-1]["step"],
        "at_peers_s": median(each["at_peers_s"] for each in arrived),
        "sent": sum(each["sent"] for each in arrived),
    }


def _published(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the versions that were published, of which there may be one for each step."""
    versions = [event for event in events if event["error"] is None]
    last = versions[-1] if versions else {}
    return {
        "versions": len(versions),
        "whole": sum(bool(event["whole"]) for event in versions),
        "version": last.get("version"),
        "step": last.get("step"),
        "bytes": sum(event["bytes"] for event in versions),
        "whole_bytes": sum(event["whole_bytes"] for event in versions),
        "seconds": median(event["seconds"] for event in versions) if versions else None,
        "lag": median(event["lag"] for event in versions) if versions else None,
        "skipped": sum(event["skipped"] or 0 for event in versions),
        "errors": sorted({event["error"] for event in events if event["error"] is not None}),
    }


def _of_all_ranks(saves: Sequence[RecordedSave]) -> dict[str, Any]:
    """A save: the longest time of each phase, the bytes of all ranks, the first error."""
    failed = next((save for save in saves if save.error is not None), None)
    first = saves[0] if failed is None else failed
    write_s = _longest([save.phase_s("write", "sync") for save in saves])
    nbytes = sum(save.bytes for save in saves)
    return {
        "step": first.step,
        "time": min(save.time for save in saves),
        "path": first.path,
        "outcome": first.outcome,
        "error": None if failed is None else f"rank {failed.rank}: {failed.error}" if len(saves) > 1 else failed.error,
        "ranks": len(saves),
        "bytes": nbytes,
        "reused": sum(save.reused for save in saves),
        "attempts": max(save.attempts for save in saves),
        "stall_s": max(save.stall_s for save in saves),
        "lost_s": max(max(save.stall_s, save.lost_s) for save in saves),
        **{f"{phase}_s": _longest([save.phase_s(phase) for save in saves]) for phase in PHASES},
        "durable_s": max(save.seconds for save in saves) if failed is None else None,
        "gbps": nbytes / 1e9 / write_s if write_s and failed is None else None,
    }


def _longest(seconds: Sequence[float | None]) -> float | None:
    return max((value for value in seconds if value is not None), default=None)
