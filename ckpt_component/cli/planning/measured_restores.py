"""Rates for `ckpt plan` from what earlier runs recorded of restores, of copies on other hosts, and of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..reports.run_records import Run, read_runs


@dataclass(frozen=True)
class RestoreRates:
    """What was measured; None: nothing was. Rates are bytes per second.

    Attributes:
        memory: of a rank that restored from the memory of its host
        peer: of a rank that had bytes from another host
        storage: of a rank that restored from storage
        link: what a host sent to its peers, from the save on until all had it
        step_s: seconds of a step
    """

    memory: float | None = None
    peer: float | None = None
    storage: float | None = None
    link: float | None = None
    step_s: float | None = None


def measured_restores(folders: Sequence[Path]) -> RestoreRates:
    """The medians of all runs in some folders.

    Raises:
        CheckpointNotFoundError: a folder has no events
        CheckpointUnreadableError: the events cannot be read
    """
    runs = [run for folder in folders for run in read_runs(folder)]
    steps = [step.end - step.begin for run in runs for step in run.leader.steps()]
    return RestoreRates(
        **{source: _median(rate for run in runs for rate in _loads(run, source)) for source in _SOURCES},
        link=_median(rate for run in runs for rate in _sent(run)),
        step_s=_median(steps),
    )


_SOURCES = ("memory", "peer", "storage")


def _median(values: Iterator[float] | Sequence[float]) -> float | None:
    return median(known) if (known := [*values]) else None


def _loads(run: Run, source: str) -> Iterator[float]:
    """Bytes per second of each load from a source; a load has the bytes of the files of all ranks."""
    for log in run.ranks.values():
        for load in log.loads:
            if load.source == source and load.outcome == "loaded" and load.bytes and load.seconds > 0:
                yield load.bytes / run.world_size / load.seconds


def _sent(run: Run) -> Iterator[float]:
    """Bytes per second that a host has sent of each snapshot, its ranks together."""
    for arrived in run.leader.at_peers:
        if arrived["sent"] and arrived["at_peers_s"] > 0:
            yield arrived["sent"] * run.world_size / max(len(run.hosts), 1) / arrived["at_peers_s"]
