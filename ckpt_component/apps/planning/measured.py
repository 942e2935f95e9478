"""Rates for `ckpt plan` from what a real run recorded: its events, or the report of a benchmark."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointConfigError
from ...events import read_events

#: Sizes must differ by this factor for a line through them to tell what does not grow with the size.
_APART = 1.5


@dataclass(frozen=True)
class Sample:
    """One save, or the median of several, of one state size. Seconds since the call.

    Attributes:
        nbytes: bytes of the largest rank.
        ranks: number of ranks.
        hosts: number of hosts.
        stall: how long the call blocked training before the write began.
        copy: how long the copy into host memory took.
        write: how long writing and syncing took.
        durable: until the checkpoint was committed.
        lost: training time lost, the stall included; None: not recorded.
        preset: the preset, if known.
    """

    nbytes: float
    ranks: int
    hosts: int
    stall: float
    copy: float
    write: float
    durable: float
    lost: float | None = None
    preset: str | None = None


@dataclass(frozen=True)
class Rates:
    """What a save costs, as fixed seconds and seconds per byte of a rank.

    Attributes:
        call: fixed part of the stall.
        copy: seconds per byte of the copy.
        fixed: fixed part of the time until durable, besides `call`.
        write: seconds per byte of writing, while all ranks of a host write.
        lost: training lost per second of copy time beyond the stall; 0 if it was not recorded.
        ranks_per_host: in the measured run.
        source: where the figures are from, for people.
        presets: presets of the measured runs, as far as they are known.
        awaited: whether the calls waited for the copy.
    """

    call: float
    copy: float
    fixed: float
    write: float
    lost: float
    ranks_per_host: float
    source: str
    presets: tuple[str, ...] = ()
    awaited: bool = True


def measured_rates(folders: Sequence[Path], preset: str) -> Rates:
    """The rates of earlier runs.

    Args:
        folders: folders of checkpoints with events, or output folders of `ckpt-bench`.
        preset: which row of a benchmark.

    Raises:
        CheckpointConfigError: there are no figures of saves in a folder.
    """
    saves = [save for folder in folders for save in _samples(folder, preset)]
    sizes: dict[float, list[Sample]] = {}
    for save in sorted(saves, key=lambda save: save.nbytes):
        # Objects make sizes differ by some bytes from save to save.
        near = next((size for size in sizes if save.nbytes <= 1.05 * size), save.nbytes)
        sizes.setdefault(near, []).append(save)
    medians = [_median(group) for group in sizes.values()]
    presets = sorted({save.preset for save in saves if save.preset})
    return _rates(medians, f"{len(saves)} saves in {', '.join(map(str, folders))}", tuple(presets))


def _samples(folder: Path, preset: str) -> list[Sample]:
    try:
        saves = list(_from_bench(folder, preset)) if (folder / "figures.json").exists() else list(_from_events(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointConfigError(f"--measured {folder} cannot be read: {type(error).__name__}: {error}.") from error
    if not saves:
        raise CheckpointConfigError(
            f"--measured {folder} has no figures of committed saves of {preset}; give the checkpoint.dir of a "
            "run, which has the folder events, or the output folder of ckpt-bench."
        )
    return saves


def _rates(samples: Sequence[Sample], source: str, presets: tuple[str, ...]) -> Rates:
    """A line through the largest size; its slope is that from the smallest one, if the two are far enough apart."""
    small, large = samples[0], samples[-1]
    copy, write = large.copy / large.nbytes, large.write / large.nbytes
    if large.nbytes >= _APART * small.nbytes:
        more = large.nbytes - small.nbytes
        copy = max(large.copy - small.copy, 0) / more or copy
        write = max(large.write - small.write, 0) / more or write
    # Parts that do not grow with the size; below zero if a larger size takes more than its share.
    awaited = large.stall >= 0.5 * large.copy
    call = large.stall - (copy * large.nbytes if awaited else 0)
    staged = large.stall if awaited else large.stall + large.copy
    fixed = large.durable - staged - write * large.nbytes
    lost = 0.0
    if large.lost is not None and large.copy:
        lost = max(large.lost - large.stall, 0) / large.copy
    return Rates(call, copy, fixed, write, lost, large.ranks / large.hosts, source, presets, awaited)


def _median(group: Sequence[Sample]) -> Sample:
    def of(name: str) -> float:
        return statistics.median(getattr(save, name) for save in group)

    lost = [save.lost for save in group if save.lost is not None]
    return Sample(
        of("nbytes"),
        group[0].ranks,
        group[0].hosts,
        of("stall"),
        of("copy"),
        of("write"),
        of("durable"),
        statistics.median(lost) if lost else None,
    )


def _from_events(folder: Path) -> Iterator[Sample]:
    """A sample per committed save: that of its slowest rank. The first of a run allocates memory and is left out."""
    runs: dict[str, dict[int, Mapping[str, Any]]] = {}
    saves: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = {}
    for event in read_events(folder):
        if event["event"] == "run":
            runs.setdefault(event["run"], {})[event["rank"]] = event
        elif event["event"] == "save" and event["outcome"] == "committed" and event["attempts"] == 1:
            saves.setdefault((event["run"], event["step"]), {})[event["rank"]] = event
    first = {run: min(step for other, step in saves if other == run) for run, _ in saves}
    for (run, step), ranks in saves.items():
        if step == first[run] and sum(other == run for other, _ in saves) > 1:
            continue
        spans = [event["spans"] for event in ranks.values()]
        lost = [event["lost_s"] for event in ranks.values() if event.get("lost_s") is not None]
        writes = [span["write"][0] for span in spans if "write" in span]
        yield Sample(
            nbytes=max(event["bytes"] for event in ranks.values()),
            ranks=len(ranks),
            hosts=len({event["host"] for event in runs.get(run, {}).values()}) or 1,
            stall=min([max(event["stall_s"] for event in ranks.values()), *writes]),
            copy=max(_seconds(span, "stage") for span in spans),
            write=max(map(_write_seconds, spans)),
            durable=max(end for span in spans for _, end in span.values()),
            lost=max(lost, default=None),
            preset=next((event.get("preset") for event in runs.get(run, {}).values()), None),
        )


def _write_seconds(spans: Mapping[str, Sequence[float]]) -> float:
    """What grows with the bytes: a sync that is short beside the write had none left to write (direct I/O)."""
    write, sync = _seconds(spans, "write"), _seconds(spans, "sync")
    return write + sync if sync > 0.2 * write else write


def _seconds(spans: Mapping[str, Sequence[float]], name: str) -> float:
    begin, end = spans.get(name, (0.0, 0.0))
    return end - begin


def _from_bench(folder: Path, preset: str) -> Iterator[Sample]:
    content = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    for case in content["cases"]:
        for run in _complete(case["rows"].get(preset, ())):
            # A row that waits for its write is staged when it is durable.
            copy = run["staged"] if run["staged"] < 0.99 * run["durable"] else 0.0
            write = run["durable"] - copy
            yield Sample(
                run["bytes"], 1, 1, min(run["stall"], copy), copy, write, run["durable"], run.get("lost"), preset
            )


def _complete(runs: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for run in runs:
        if all(isinstance(run.get(name), (int, float)) for name in ("bytes", "stall", "staged", "durable")):
            yield run
