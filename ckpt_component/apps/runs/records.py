"""The runs of a folder, from their events: per rank the steps, saves and loads."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CheckpointNotFoundError, CheckpointUnreadableError
from ...events import FOLDER, read_events

logger = logging.getLogger(__name__)

#: The phases of a save, in order.
PHASES = ("plan", "memory", "stage", "queue", "write", "sync", "vote", "commit")

Span = tuple[float, float]


@dataclass(frozen=True)
class Save:
    """A save of one rank.

    Attributes:
        time: When it was called, in seconds since 1970; `spans` are relative to it.
        seconds: Until it was committed, or had failed.
    """

    rank: int
    time: float
    step: int | None
    path: str
    outcome: str
    error: str | None
    nbytes: int
    attempts: int
    stall_s: float
    lost_s: float | None
    spans: Mapping[str, Span]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return max([self.stall_s, *(end for _, end in self.spans.values())])

    def phase_s(self, *names: str) -> float | None:
        """How long these phases took together; None if none of them is known."""
        known = [self.spans[name] for name in names if name in self.spans]
        return sum(end - begin for begin, end in known) if known else None


@dataclass(frozen=True)
class Load:
    """A load of one rank; as for `Save`."""

    rank: int
    time: float
    step: int | None
    path: str
    error: str | None
    nbytes: int
    seconds: float
    verified: bool
    spans: Mapping[str, Span]


@dataclass(frozen=True)
class Step:
    """A training step: its number, and when it began and ended, in seconds since 1970. It waits for no save."""

    number: int
    begin: float
    end: float


@dataclass
class RankLog:
    """What one rank of a run recorded.

    Attributes:
        ends: The number and the end of each step, in order.
        notes: Other events: when, what, and the step, such as of a checkpoint that was deleted.
    """

    rank: int
    host: str = ""
    pid: int | None = None
    ends: list[tuple[int, float]] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    notes: list[tuple[float, str, int | None]] = field(default_factory=list)

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
        token: Identifies it.
        began: When its first event was recorded, in seconds since 1970.
        ended: When its last event was recorded, or its last step or save ended.
    """

    token: str
    began: float
    ended: float
    world_size: int = 1
    preset: str | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)
    ranks: dict[int, RankLog] = field(default_factory=dict)

    @property
    def leader(self) -> RankLog:
        """The log of rank 0, or of the first rank that has one."""
        return self.ranks[min(self.ranks)]

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event. Raises KeyError, TypeError or ValueError for one of another form."""
        # A save that was skipped has no time of its own.
        rank, when, kind = int(event["rank"]), float(event["time"]) or self.ended, event["event"]
        log, ended = self.ranks.get(rank) or RankLog(rank), when
        if kind == "run":
            self.world_size = int(event["world_size"])
            self.preset, self.versions = event.get("preset"), dict(event.get("versions") or {})
            log.host, log.pid = str(event.get("host") or ""), event.get("pid")
        elif kind == "steps":
            ends = [(int(event["first"]) + number, float(end)) for number, end in enumerate(event["ends"])]
            log.ends += ends
            ended = max([when, *(end for _, end in ends)])
        elif kind == "save":
            log.saves.append(_save(event, rank, when))
            ended = when + log.saves[-1].seconds
        elif kind == "load":
            log.loads.append(_load(event, rank, when))
            ended = when + log.loads[-1].seconds
        else:
            log.notes.append((when, str(kind), event.get("step")))
        self.ranks[rank] = log
        self.began, self.ended = min(self.began, when), max(self.ended, ended)


def read_runs(folder: Path) -> list[Run]:
    """The runs that saved in a folder, the oldest first.

    Args:
        folder: The folder of the checkpoints, or the folder of the events in it.

    Raises:
        CheckpointNotFoundError: It has no events; the text says what it has.
        CheckpointUnreadableError: The events cannot be read.
    """
    if folder.name == FOLDER and not (folder / FOLDER).is_dir():
        folder = folder.parent
    runs: dict[str, Run] = {}
    try:
        for event in read_events(folder):
            try:
                token, when = str(event["run"]), float(event["time"])
                run = runs.get(token) or Run(token, when, when)
                run.add(event)
                runs[token] = run
            except (KeyError, TypeError, ValueError) as error:
                logger.info("an event in %s is not of the form that this release reads (%r)", folder, error)
    except OSError as error:
        raise CheckpointUnreadableError(f"The events in {folder} cannot be read: {error}.") from error
    found = sorted(runs.values(), key=lambda run: run.began)
    if not found:
        raise CheckpointNotFoundError(why_no_run(folder))
    for run in found:
        for log in run.ranks.values():
            log.ends.sort(key=lambda step: step[1])
            log.saves.sort(key=lambda save: save.time)
    return found


def why_no_run(folder: Path) -> str:
    """Why a folder has no events to show, and what to type instead."""
    if not folder.is_dir():
        there = f"{folder} is a file" if folder.exists() else f"There is no folder {folder}"
        return f"{there}; give the folder with the checkpoints of a run (checkpoint.dir)."
    near = [child for child in sorted(folder.iterdir()) if (child / FOLDER).is_dir()]
    if near:
        names = " or ".join(map(str, near[:3]))
        return f"{folder} is not the folder of a run's checkpoints, but a folder of such folders; type {names}."
    if (folder.parent / FOLDER).is_dir():
        return f"{folder} is a part of a run's folder; type {folder.parent}."
    if (folder / FOLDER).is_dir():
        return f"{folder / FOLDER} has no events yet; a run writes them with its first save."
    if not any(folder.iterdir()):
        return f"{folder} is empty; give the folder with the checkpoints of a run (checkpoint.dir)."
    return (
        f"{folder} has no {FOLDER}/, which runs write beside their checkpoints unless checkpoint.events=false; "
        f"ckpt ls {folder} lists what is there."
    )


def _save(event: Mapping[str, Any], rank: int, when: float) -> Save:
    lost = event.get("lost_s")
    return Save(
        rank,
        when,
        None if event.get("step") is None else int(event["step"]),
        os.fspath(event["path"]),
        str(event["outcome"]),
        _text(event.get("error")),
        int(event.get("bytes") or 0),
        int(event.get("attempts") or 1),
        float(event.get("stall_s") or 0),
        None if lost is None else float(lost),
        _spans(event),
    )


def _load(event: Mapping[str, Any], rank: int, when: float) -> Load:
    step = event.get("step")
    return Load(
        rank,
        when,
        None if step is None else int(step),
        os.fspath(event["path"]),
        _text(event.get("error")),
        int(event.get("bytes") or 0),
        float(event["seconds"]),
        bool(event.get("verified")),
        _spans(event),
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _spans(event: Mapping[str, Any]) -> dict[str, Span]:
    return {str(name): (float(begin), float(end)) for name, (begin, end) in (event.get("spans") or {}).items()}
