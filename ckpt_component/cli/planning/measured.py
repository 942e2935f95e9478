"""Rates for `ckpt plan` from the saves that earlier runs recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ...config.config_files import presets
from ...errors import CheckpointConfigError
from ..reports.run_records import RecordedSave, read_runs

#: Sizes must differ by this factor for a line through them to tell what does not grow with the size.
_APART = 1.5
#: Objects make sizes differ by some bytes from save to save; these are one size.
_NEAR = 1.05
#: A call that takes at least this part of the copy has waited for it.
_AWAITED = 0.5
#: A sync that takes at most this part of the write had nothing left to write.
_SHORT_SYNC = 0.2


class Sample(NamedTuple):
    """One save, or the medians of several, of its slowest rank. Seconds since the call.

    Attributes:
        nbytes: bytes of the largest rank, written and reused
        written: bytes that a rank wrote, at most
        ranks: number of ranks
        hosts: number of hosts
        stall: how long the call blocked training before the write began
        copy: how long the copy into host memory took
        write: how long writing and syncing took
        durable: until the checkpoint was committed
        lost: training time lost, the stall included
    """

    nbytes: float
    written: float
    ranks: float
    hosts: float
    stall: float
    copy: float
    write: float
    durable: float
    lost: float


@dataclass(frozen=True)
class Rates:
    """What a save costs, as fixed seconds and seconds per byte of a rank.

    Attributes:
        call: fixed part of the stall
        copy: seconds per byte of the copy
        fixed: fixed part of the time until durable, besides `call`
        write: seconds per byte of writing, while all ranks of a host write
        written: part of the bytes that is written; the rest is reused from earlier checkpoints
        lost: training lost per second of copy time beyond the stall
        ranks_per_host: in the measured run
        source: where the figures are from, for people
        awaited: whether the calls waited for the copy
    """

    call: float
    copy: float
    fixed: float
    write: float
    written: float
    lost: float
    ranks_per_host: float
    source: str
    awaited: bool


def measured_rates(folders: Sequence[Path], preset: str) -> Rates:
    """The rates of earlier runs with a preset, from their folders of checkpoints.

    A line through the saves of the largest size; its slope comes from the smallest size, if the two are far enough
    apart, else from zero.

    Raises:
        CheckpointNotFoundError: a folder has no events
        CheckpointConfigError: a folder has no committed saves, or those of another preset
    """
    saves = [save for folder in folders for save in _samples(folder, preset)]
    least, most = min(save.nbytes for save in saves), max(save.nbytes for save in saves)
    small = _median([save for save in saves if save.nbytes <= least * _NEAR])
    large = _median([save for save in saves if save.nbytes >= most / _NEAR])
    copy, write = large.copy / large.nbytes, large.write / large.written
    if large.nbytes >= _APART * small.nbytes:
        copy = max(large.copy - small.copy, 0) / (large.nbytes - small.nbytes) or copy
    if large.written >= _APART * small.written:
        write = max(large.write - small.write, 0) / (large.written - small.written) or write
    # Parts that do not grow with the size; below zero if a larger size takes more than its share.
    awaited = large.stall >= _AWAITED * large.copy
    return Rates(
        call=large.stall - (copy * large.nbytes if awaited else 0),
        copy=copy,
        fixed=large.durable - large.stall - (0 if awaited else large.copy) - write * large.written,
        write=write,
        written=large.written / large.nbytes,
        lost=max(large.lost - large.stall, 0) / large.copy if large.copy else 0.0,
        ranks_per_host=large.ranks / large.hosts,
        source=f"{len(saves)} saves in {', '.join(map(str, folders))}",
        awaited=awaited,
    )


def _median(saves: Sequence[Sample]) -> Sample:
    return Sample(*map(median, zip(*saves, strict=True)))


def _samples(folder: Path, preset: str) -> list[Sample]:
    """A sample per committed save. The first of a run, which allocates memory, and retried ones are left out."""
    samples, names = list[Sample](), {file.name for file in presets()}
    for run in read_runs(folder):
        if run.preset in names - {preset}:
            raise CheckpointConfigError(
                f"The run in {folder} saved with {run.preset}; type --preset {run.preset}, or measure {preset}."
            )
        saves = [save for save in run.saves() if all(_in_one_go(record) for record in save)]
        samples += [_sample(save, len(run.hosts) or 1) for save in saves[1:] or saves]
    if not samples:
        raise CheckpointConfigError(f"The events in {folder} have no committed saves; let the run save a few times.")
    return samples


def _in_one_go(record: RecordedSave) -> bool:
    return record.outcome == "committed" and record.attempts == 1


def _sample(save: Sequence[RecordedSave], hosts: int) -> Sample:
    return Sample(
        nbytes=max(rank.bytes + rank.reused for rank in save),
        written=max(rank.bytes for rank in save),
        ranks=len(save),
        hosts=hosts,
        # A call can return after the write has begun; that part is in `write`.
        stall=min(
            [max(rank.stall_s for rank in save), *(rank.spans["write"][0] for rank in save if "write" in rank.spans)]
        ),
        copy=max(rank.phase_s("stage") or 0.0 for rank in save),
        write=max(map(_write_s, save)),
        durable=max(rank.seconds for rank in save),
        lost=max(rank.lost_s for rank in save),
    )


def _write_s(record: RecordedSave) -> float:
    """What grows with the bytes: a sync that is short beside the write had none left to write (direct I/O)."""
    write, sync = record.phase_s("write") or 0.0, record.phase_s("sync") or 0.0
    return write + sync if sync > _SHORT_SYNC * write else write
