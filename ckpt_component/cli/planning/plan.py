"""What saving will cost a run: the figures of `ckpt plan`, each with where it comes from."""

from __future__ import annotations

from ...core.storage.space import amount
from .formulas import best_interval, mtbf_of, training_fraction
from .losses import SaveTimes, recovery_figures
from .scenario import Forecast, Scenario

#: Resident memory of a writer process, which imports no torch.
WRITER_BYTES = 15e6
#: Assumed without a measurement: bytes per second and rank copied into host memory.
_COPY = 10e9
#: Seconds: a save that costs nothing would have no best interval.
_LEAST_LOSS = 1e-3
_WRITTEN = "the part of the state that the measured run wrote; it reused the rest"


def plan(scenario: Scenario) -> list[Forecast]:
    """The figures for a run, in the order in which they follow from each other."""
    rank_bytes, rates, sizes = scenario.rank_bytes, scenario.rates, scenario.sizes
    beside = WRITER_BYTES if sizes.caller != "inline" else 0.0
    if not sizes.arenas:  # the writer gathers live tensors into two blocks per worker
        beside += sizes.blocks
    images = scenario.images.own + scenario.images.copies
    snapshots = f"{images} x state of a rank + " if images else ""

    copy = rank_bytes * (rates.copy if rates else 1 / _COPY) if sizes.arenas else 0.0
    call, fixed = (rates.call, rates.fixed) if rates else (0.0, 0.0)
    # The stager awaits its copies where those beside the steps cost more.
    overlapped = sizes.stager == "zero_overhead" and not (rates and rates.awaited)
    rate, source = _first_tier(scenario)
    written = scenario.state * (rates.written if rates else 1.0)
    of_state = "state" if written == scenario.state else "written per save"
    write = None if rate is None else written / rate
    call = max(call, -copy)  # the line through two sizes may cut below zero; a small state does not
    durable = None if write is None else max(call + copy + write + fixed, write)
    awaits_write = sizes.caller == "inline"
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
    tier = "local.dir rate" if scenario.tiered else "storage rate"
    return [
        Forecast("state of a rank", rank_bytes, "bytes", "state / ranks"),
        Forecast(
            "host memory",
            scenario.ranks_here * (images * rank_bytes + beside),
            "bytes",
            f"{scenario.ranks_here} x ({snapshots}{amount(round(beside))})",
        ),
        Forecast("stall", stall, "s", stalled),
        *([Forecast("copy beside steps", copy, "s", copy_source)] if overlapped else []),
        Forecast("lost per save", lost, "s", "stall + steps slowed by the copy" if overlapped else "stall"),
        *([Forecast(of_state, written, "bytes", _WRITTEN)] if written < scenario.state else []),
        Forecast(tier, rate, "bytes/s", source),
        Forecast("durable", durable, "s", f"call + copy + {of_state} / {tier} + vote and commit"),
        Forecast(
            "MTBF", mtbf, "s", "--mtbf" if scenario.mtbf else "6.5 failures in 1,000 host-days (arXiv:2410.21680)"
        ),
        Forecast("restart", scenario.restart_s, "s", "detect, start, load: --restart-s"),
        Forecast("best interval", best, "s", bound),
        Forecast(f"{tier} needed", None if best is None else written / best, "bytes/s", f"{of_state} / interval"),
        Forecast("training", training, "of the time", "Daly 2006"),
        *recovery_figures(scenario, SaveTimes(copy, lost, best, risk)),
    ]


def _first_tier(scenario: Scenario) -> tuple[float | None, str]:
    """Bytes per second that saves go to storage with, all ranks together, and where that is from."""
    if scenario.tiered and scenario.local is not None:
        return scenario.local * scenario.hosts, f"--local-gbps x {scenario.hosts} host(s)"
    if scenario.storage is not None and not scenario.tiered:
        return scenario.storage, "--storage-gbps"
    rates = scenario.rates
    if rates is None or not rates.write:
        return None, f"unknown: --{'local' if scenario.tiered else 'storage'}-gbps or --measured"
    # Ranks of a host share its path to the storage, and a rank alone on it is as fast as those together.
    host = rates.ranks_per_host / rates.write
    return host * scenario.hosts, f"measured: {host / 1e9:.2f} GB/s x {scenario.hosts} host(s)"
