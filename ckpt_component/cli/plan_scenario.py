"""What `ckpt plan` is asked, its formulas, and the rates that earlier runs recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ..config.config_files import parts_of, presets
from ..config.rules import ImageCount
from ..config.schema import PARTS, Recovery
from ..core.coordination.coordinator import Hosts
from ..errors import CheckpointConfigError
from .reports.run_records import RecordedSave, Run, read_runs

#: What the table is too narrow for.
DALY = (
    "With L lost per save, M MTBF, R restart + durable (J. T. Daly, Future Gen. Comp. Syst. 22, 2006):",
    "  T = sqrt(2 L M) (1 + sqrt(L / 2M) / 3 + L / 18M) - L, first term: J. W. Young, CACM 17, 1974",
    "  training = T / (M exp(R / M) (exp((T + L) / M) - 1))",
)

#: Failures per host and second: 6.5 in 1,000 host-days of the largest cluster of arXiv:2410.21680.
_FAILURES = 6.5 / 1000 / 86400


def mtbf_of(hosts: int) -> float:
    """The mean time between failures of a job on so many hosts, at the rate of a published cluster."""
    return 1 / (hosts * _FAILURES)


def best_interval(lost: float, mtbf: float) -> float:
    """The time of training between two saves that wastes the least.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22 (2006), which refines J. W. Young, "A first order approximation to the optimum checkpoint
    interval", CACM 17 (1974): sqrt(2 lost mtbf).

    Args:
        lost: training time that one save costs
        mtbf: mean time between failures
    """
    if lost >= 2 * mtbf:
        return mtbf
    half = lost / (2 * mtbf)
    return math.sqrt(2 * lost * mtbf) * (1 + math.sqrt(half) / 3 + half / 9) - lost


def training_fraction(interval: float, lost: float, mtbf: float, restart: float, durable: float) -> float:
    """The fraction of time that a run with failures spends on training that lasts (Daly 2006, the complete model).

    Args:
        interval: training time between two saves
        lost: training time that one save costs
        mtbf: mean time between failures, which are independent of each other
        restart: time from a failure until training continues
        durable: time from a snapshot until it is durable. A failure within it falls back to the save before, so this
            much more is trained again, as if the restart took longer.
    """
    # Beyond this the run hardly ever gets from one save to the next, and exp() overflows.
    if (interval + lost + restart + durable) / mtbf > 500:
        return 0.0
    cost = mtbf * math.exp((restart + durable) / mtbf) * math.expm1((interval + lost) / mtbf)
    return interval / cost


#: From a failure until training continues, without a measurement.
RESTART_S = 300.0


@dataclass(frozen=True)
class PartSizes:
    """What the plan needs to know of the parts of a config.

    Attributes:
        stager: its option
        caller: its option
        arenas: images that the stager takes; 0: the writer reads the live tensors
        blocks: bytes into which the writer then gathers them
    """

    stager: str
    caller: str
    arenas: int
    blocks: int

    @classmethod
    def of_preset(cls, preset: str) -> PartSizes:
        """Those of one of our presets, not `off`."""
        names = parts_of(preset)
        writer = PARTS["writer"][names["writer"]]()
        blocks = 2 * writer.workers * writer.block_bytes  # type: ignore[attr-defined]
        arenas = getattr(PARTS["stager"][names["stager"]](), "arenas", 0)
        return cls(names["stager"], names["caller"], arenas, blocks)


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


@dataclass(frozen=True)
class Scenario:
    """What to plan for. Rates are bytes per second, times seconds.

    Attributes:
        state: bytes of the state of all ranks
        ranks: number of ranks
        ranks_per_host: ranks on each host, at most
        preset: one of our presets, not `off`, or a user's if `parts` are given
        parts: of the config; None: those of the preset
        storage: what the storage takes from all ranks together; None: as measured, or unknown
        tiered: whether saves go to `checkpoint.local.dir` first, a folder of each host
        local: what that takes from a host; None: as measured, or unknown
        upload: the most that a host uploads; None: what the storage takes
        mtbf: mean time between failures of the whole run; None: at a published rate per host
        restart_s: from a failure until training continues
        recovery: which snapshots stay in memory
        memory_every: time between snapshots that go to memory alone; None: only those of saves stay there
        link: what a host sends to another one; None: as measured, or unknown
        step_s: the time of a step; None: as measured, or unknown
        rates: what saves of an earlier run with the preset took; None: assumptions
        restores: what its restores took
        names: the hosts; empty: they have numbers
    """

    state: float
    ranks: int = 1
    ranks_per_host: int = 1
    preset: str = "async_persistent"
    parts: PartSizes | None = None
    storage: float | None = None
    tiered: bool = False
    local: float | None = None
    upload: float | None = None
    mtbf: float | None = None
    restart_s: float = RESTART_S
    recovery: Recovery = field(default_factory=Recovery)
    memory_every: float | None = None
    link: float | None = None
    step_s: float | None = None
    rates: Rates | None = None
    restores: RestoreRates = field(default_factory=RestoreRates)
    names: tuple[str, ...] = ()

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.names) or math.ceil(self.ranks / self.ranks_per_host)

    @property
    def ranks_here(self) -> int:
        """Number of ranks on the first host."""
        return min(self.ranks_per_host, self.ranks)

    @property
    def rank_bytes(self) -> float:
        """State of a rank."""
        return self.state / self.ranks

    @property
    def host_bytes(self) -> float:
        """State of the ranks on a host."""
        return self.rank_bytes * self.ranks_here

    @cached_property
    def sizes(self) -> PartSizes:
        """What is known of the parts."""
        return self.parts or PartSizes.of_preset(self.preset)

    @cached_property
    def images(self) -> ImageCount:
        """The images that a rank has."""
        return ImageCount.of(self.recovery, self.sizes.arenas, self.hosts)

    @property
    def has_peers(self) -> bool:
        """Whether other hosts have copies."""
        return self.images.copies > 0

    @property
    def step(self) -> float | None:
        """The time of a step; None: unknown."""
        return self.step_s or self.restores.step_s

    def peers(self) -> dict[str, list[str]]:
        """The hosts that have copies for each host, in the order of the ranks."""
        if not self.has_peers:
            return {}
        names = self.names or tuple(f"host{number}" for number in range(self.hosts))
        hosts, given = Hosts(names), self.recovery.peers or {}
        return {name: hosts.peers_of(name, given, self.recovery.replicas) for name in names}


@dataclass(frozen=True)
class Forecast:
    """One predicted figure: its value (None: unknown), unit, and formula or source."""

    name: str
    value: float | None
    unit: str
    why: str


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


def measured_restores(folders: Sequence[Path]) -> RestoreRates:
    """The medians of all runs in some folders.

    Raises:
        CheckpointNotFoundError: a folder has no events
        CheckpointUnreadableError: the events cannot be read
    """
    runs = [run for folder in folders for run in read_runs(folder)]
    steps = [step.end - step.begin for run in runs for step in run.leader.steps()]
    return RestoreRates(
        **{source: _median_rate(rate for run in runs for rate in _loads(run, source)) for source in _SOURCES},
        link=_median_rate(rate for run in runs for rate in _sent(run)),
        step_s=_median_rate(steps),
    )


_SOURCES = ("memory", "peer", "storage")


def _median_rate(values: Iterator[float] | Sequence[float]) -> float | None:
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
