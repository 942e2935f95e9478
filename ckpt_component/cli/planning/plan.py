"""What saving will cost a run: the figures of `ckpt plan`, each with where it comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...config.config_files import parts_of
from ...config.schema import PARTS
from ...core.storage.space import amount
from .formulas import best_interval, mtbf_of, training_fraction
from .measured import Rates

#: Resident memory of a writer process, which imports no torch.
WRITER_BYTES = 15e6
#: Assumed without a measurement: bytes per second and rank copied into host memory, and the time from a failure until
#: training continues.
_COPY, RESTART_S = 10e9, 300.0


#: Seconds: a save that costs nothing would have no best interval.
_LEAST_LOSS = 1e-3
_WRITTEN = "the part of the state that the measured run wrote; it reused the rest"


@dataclass(frozen=True)
class Scenario:
    """What to plan for.

    Attributes:
        state: bytes of the state of all ranks
        ranks: number of ranks
        ranks_per_host: ranks on each host
        preset: one of our presets, not `off`
        storage: bytes per second that the storage takes from all ranks together; None: as measured, or unknown
        mtbf: mean time between failures of the whole run, seconds; None: at a published rate per host
        restart_s: from a failure until training continues
        recovery: whether the newest snapshot stays in the hosts' memory: checkpoint/recovery=host
        memory_every: seconds between snapshots that go to memory alone; None: only those of saves stay there
        rates: what an earlier run with the preset measured; None: assumptions
    """

    state: float
    ranks: int = 1
    ranks_per_host: int = 1
    preset: str = "async_persistent"
    storage: float | None = None
    mtbf: float | None = None
    restart_s: float = RESTART_S
    recovery: bool = False
    memory_every: float | None = None
    rates: Rates | None = None

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return math.ceil(self.ranks / self.ranks_per_host)


@dataclass(frozen=True)
class Forecast:
    """One predicted figure: its value (None: unknown), unit, and formula or source."""

    name: str
    value: float | None
    unit: str
    why: str


def plan(scenario: Scenario) -> list[Forecast]:
    """The figures for a run, in the order in which they follow from each other."""
    rank_bytes, rates = scenario.state / scenario.ranks, scenario.rates
    parts = parts_of(scenario.preset)
    arenas = getattr(PARTS["stager"][parts["stager"]](), "arenas", 0)
    images = arenas
    if scenario.recovery:  # one stays, and the others are in flight
        images = 1 + max(arenas, 1 if scenario.memory_every is None else 2)
    writer = PARTS["writer"][parts["writer"]]()
    beside = WRITER_BYTES if parts["caller"] != "inline" else 0.0
    if not arenas:  # the writer gathers live tensors into two blocks per worker
        beside += 2 * writer.workers * writer.block_bytes  # type: ignore[attr-defined]
    ranks_here = min(scenario.ranks_per_host, scenario.ranks)
    snapshots = f"{images} x state of a rank + " if images else ""

    copy = rank_bytes * (rates.copy if rates else 1 / _COPY) if arenas else 0.0
    call, fixed = (rates.call, rates.fixed) if rates else (0.0, 0.0)
    # The stager awaits its copies where those beside the steps cost more.
    overlapped = parts["stager"] == "zero_overhead" and not (rates and rates.awaited)
    rate, source = _storage(scenario)
    written = scenario.state * (rates.written if rates else 1.0)
    of_state = "state" if written == scenario.state else "written per save"
    write = None if rate is None else written / rate
    call = max(call, -copy)  # the line through two sizes may cut below zero; a small state does not
    durable = None if write is None else max(call + copy + write + fixed, write)
    awaits_write = parts["caller"] == "inline"
    copy_source = f"state of a rank / {_COPY / 1e9:g} GB/s (assumed without --measured)"
    if rates and rates.copy:
        copy_source = f"{rates.call:.3f} s + state of a rank / {1e-9 / rates.copy:.2f} GB/s (measured)"
    if awaits_write:
        stall, stalled = durable, "durable: training waits"
    else:
        stall, stalled = (max(call, 0.0), "call") if overlapped else (call + copy, copy_source)
    # A copy beside the steps takes memory bandwidth from them: unmeasured, as much time as if it were awaited.
    slowdown = rates.lost if rates and rates.lost else float(overlapped)
    lost = None if stall is None else stall + slowdown * copy

    mtbf = scenario.mtbf or mtbf_of(scenario.hosts)
    best = training = risk = None
    if lost is not None:
        best = max(best_interval(max(lost, _LEAST_LOSS), mtbf), durable or 0.0)
        risk = 0.0 if awaits_write else best if durable is None else durable
        training = training_fraction(best, lost, mtbf, scenario.restart_s, risk)
    bound = "durable: saves do not overlap" if best is not None and best == durable else "optimum, Daly 2006"
    return [
        Forecast("state of a rank", rank_bytes, "bytes", "state / ranks"),
        Forecast(
            "host memory",
            ranks_here * (images * rank_bytes + beside),
            "bytes",
            f"{ranks_here} x ({snapshots}{amount(round(beside))})",
        ),
        Forecast("stall", stall, "s", stalled),
        *([Forecast("copy beside steps", copy, "s", copy_source)] if overlapped else []),
        Forecast("lost per save", lost, "s", "stall + steps slowed by the copy" if overlapped else "stall"),
        *([Forecast(of_state, written, "bytes", _WRITTEN)] if written < scenario.state else []),
        Forecast("storage rate", rate, "bytes/s", source),
        Forecast("durable", durable, "s", f"call + copy + {of_state} / storage rate + vote and commit"),
        Forecast(
            "MTBF", mtbf, "s", "--mtbf" if scenario.mtbf else "6.5 failures in 1,000 host-days (arXiv:2410.21680)"
        ),
        Forecast("restart", scenario.restart_s, "s", "detect, start, load: --restart-s"),
        Forecast("best interval", best, "s", bound),
        Forecast("storage rate needed", None if best is None else written / best, "bytes/s", f"{of_state} / interval"),
        Forecast("training", training, "of the time", "Daly 2006"),
        *(_recovery(scenario, images, rank_bytes, copy, lost, best, risk) if scenario.recovery else []),
    ]


def _recovery(
    scenario: Scenario,
    images: int,
    rank_bytes: float,
    copy: float,
    lost: float | None,
    best: float | None,
    risk: float | None,
) -> list[Forecast]:
    """What the snapshot in memory costs, and what it saves in a failure that the host survives."""
    every = scenario.memory_every
    between = best if every is None else every
    part, one_host = "an interval" if every is None else "--memory-every", scenario.hosts == 1
    return [
        Forecast("memory of a rank", images * rank_bytes, "bytes", f"1 image that stays, {images - 1} in flight"),
        *(
            [Forecast("memory snapshots", lost / every, "of the time", "lost per save / --memory-every")]
            if every is not None and lost is not None
            else []
        ),
        Forecast(
            "repeated, from disk",
            None if best is None or risk is None else best / 2 + risk,
            "s",
            "by a failure: half an interval + durable",
        ),
        Forecast(
            "repeated, from memory",
            between / 2 + copy if one_host and between is not None else None,
            "s",
            f"if the host lives: half {part} + copy" if one_host else "needs all ranks on one host",
        ),
    ]


def _storage(scenario: Scenario) -> tuple[float | None, str]:
    """Bytes per second of the storage for all ranks together, and where that is from."""
    if scenario.storage is not None:
        return scenario.storage, "--storage-gbps"
    rates = scenario.rates
    if rates is None or not rates.write:
        return None, "unknown: --storage-gbps or --measured"
    # Ranks of a host share its path to the storage, and a rank alone on it is as fast as those together.
    host = rates.ranks_per_host / rates.write
    return host * scenario.hosts, f"measured: {host / 1e9:.2f} GB/s x {scenario.hosts} host(s)"
