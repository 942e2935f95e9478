"""`ckpt plan`: what saving will cost a run, from formulas or from what an earlier run measured."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from ..config.config_files import presets
from ..config.quantities import BYTES, SECONDS
from ..config.schema import GROUPS, Recovery
from ..core.options import RecoveryMode
from ..core.spelling import invalid_choice
from ..core.storage.space import amount
from ..errors import CheckpointConfigError
from .config_words import USUAL, add_config, refuse_below_zero, with_unit
from .output import Output, Table, counted, duration, width
from .plan_losses import HostFailure, SaveTimes, failures_of, recovery_figures
from .plan_scenario import (
    DALY,
    RESTART_S,
    Forecast,
    PartSizes,
    Scenario,
    best_interval,
    measured_rates,
    measured_restores,
    mtbf_of,
    training_fraction,
)
from .run_checks import host_names

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


#: Hosts in the table of peers; a job of many has the same pattern.
_SHOWN = 8


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("--state", required=True, metavar="BYTES", help="the state of all ranks together, such as 1.2TB")
    add("--ranks", type=int, help="number of ranks (--ranks-per-host on each of --hosts; without them 1)")
    add("--ranks-per-host", type=int, metavar="N", help="ranks on each host (8, or --ranks / --hosts)")
    add("--hosts", metavar="N|NAMES", help="how many hosts, or which: node1,node2 or node[1-8]")
    add("--preset", help=f"see ckpt presets ({USUAL}, or that of --config)")
    modes = "|".join(GROUPS["recovery"])
    more = "host: also keep the newest snapshot in memory; peers: on another host too (none, or as --config says)"
    add("--recovery", metavar=modes, help=more)
    add_config(parser)
    add("--memory-every", metavar="TIME", help="time between snapshots for memory alone, as recovery.every_steps gives")
    add("--step", metavar="TIME", help="time of a step, such as 1.5s: losses are in steps too")
    add("--link", metavar="BYTES/S", help="what a host sends to another one, such as 10GB/s")
    add("--local-gbps", type=float, metavar="GB/S", help="what checkpoint.local.dir takes from a host, in GB/s")
    add("--storage-gbps", type=float, metavar="GB/S", help="what the storage takes from all ranks, in GB/s")
    add("--mtbf", metavar="TIME", help="mean time between failures of the run, such as 8h")
    add("--restart-s", type=float, default=RESTART_S, metavar="S", help="from failure to training (300)")
    more = "rates of a run, from its checkpoint.dir; twice, with another size, is better"
    add("--measured", type=Path, action="append", metavar="FOLDER", help=more)


def run_plan(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt plan`: what saving will cost a run, from formulas or from what an earlier run measured.

    Predict what saving costs a run: host memory, stall, time until durable, storage rate, the best interval, and the
    fraction of time that is training; with --recovery or checkpoint.local.dir also who has copies for whom, and what is
    lost when ranks or hosts fail. Every figure names its formula or source.

    examples:
      ckpt plan --state 1.2TB --ranks 1024 --ranks-per-host 8 --storage-gbps 200
      ckpt plan --state 40GB --ranks 8 --measured checkpoints
      ckpt plan --state 640GB --ranks 64 --hosts 8 --recovery peers --link 10GB
      ckpt plan --state 640GB --ranks 64 --hosts 8 --config +recipe=many_hosts

    ?: a figure that needs another option.
    """
    question = _question(parsed)
    figures = plan(question)
    failures = failures_of(question, figures)
    notes = list(_notes(question, {figure.name: figure.value for figure in figures}))
    data = {
        "question": {**asdict(question), "recovery": question.recovery.mode.name, "hosts": question.hosts},
        "figures": figures,
        "peers": question.peers(),
        "failures": failures,
        "notes": notes,
    }
    output.result(data, _lines(question, figures, failures, notes, output))


def _question(parsed: argparse.Namespace) -> Scenario:
    names = [file.name for file in presets() if file.name != "off"]
    if parsed.preset is not None and parsed.preset not in names:
        raise CheckpointConfigError(invalid_choice("--preset", parsed.preset, names))
    for name in ("ranks", "ranks_per_host", "storage_gbps", "local_gbps", "restart_s"):
        if getattr(parsed, name) is not None:
            refuse_below_zero(f"--{name.replace('_', '-')}", getattr(parsed, name))
    if parsed.recovery is not None and parsed.recovery not in GROUPS["recovery"]:
        raise CheckpointConfigError(invalid_choice("--recovery", parsed.recovery, list(GROUPS["recovery"])))
    state = with_unit(parsed.state, BYTES, "--state", "1.2TB")
    config = _planned_config(parsed)
    _refuse_unfit_recovery(parsed, config)
    folders = [folder.expanduser() for folder in parsed.measured or ()]
    hosts, ranks, ranks_per_host = _places(parsed)
    restores = measured_restores(folders)
    step = _time(parsed.step, "--step", "1.5s")
    return Scenario(
        state=state,
        ranks=ranks,
        ranks_per_host=ranks_per_host,
        preset=config.preset,
        parts=config.parts,
        storage=None if parsed.storage_gbps is None else parsed.storage_gbps * 1e9,
        tiered=config.tiered or parsed.local_gbps is not None,
        local=None if parsed.local_gbps is None else parsed.local_gbps * 1e9,
        upload=config.upload,
        mtbf=_time(parsed.mtbf, "--mtbf", "8h"),
        restart_s=parsed.restart_s,
        recovery=config.recovery,
        memory_every=_memory_every(parsed, config.recovery, step or restores.step_s),
        link=None if parsed.link is None else with_unit(parsed.link, BYTES, "--link", "10GB/s"),
        step_s=step,
        rates=measured_rates(folders, config.preset) if folders else None,
        restores=restores,
        names=hosts,
    )


class _PlannedConfig(NamedTuple):
    """What is planned with of a config.

    Attributes:
        preset: its name
        parts: its parts; None: those of the preset
        recovery: what stays in memory
        tiered: whether there is a local tier
        upload: the most that a host uploads from it, bytes per second; None: no limit
    """

    preset: str
    parts: PartSizes | None
    recovery: Recovery
    tiered: bool = False
    upload: float | None = None


def _planned_config(parsed: argparse.Namespace) -> _PlannedConfig:
    options = [] if parsed.recovery is None else [f"checkpoint/recovery={parsed.recovery}"]
    if not parsed.config:
        config = _PlannedConfig(parsed.preset or USUAL, None, Recovery(RecoveryMode[parsed.recovery or "none"]))
    else:
        from .explain_command import composed  # imports Hydra

        if parsed.preset is not None:
            options.append(f"checkpoint={parsed.preset}")
        made = composed([*parsed.config, *options])
        local, upload = made.settings.local.dir, made.settings.upload.max_bytes_per_second
        config = _PlannedConfig(made.preset, made.sizes, made.settings.recovery, local is not None, upload)
    if parsed.memory_every is None or config.recovery.every_steps is not None:
        return config
    return config._replace(recovery=replace(config.recovery, every_steps=1))  # as often as that


def _places(parsed: argparse.Namespace) -> tuple[tuple[str, ...], int, int]:
    """The names of the hosts, if they are given; how many ranks there are, and how many on each host."""
    hosts = () if parsed.hosts is None else host_names(parsed.hosts)
    ranks, here = parsed.ranks, parsed.ranks_per_host
    if not hosts:
        return (), ranks or 1, here or 8
    ranks = ranks or len(hosts) * (here or 8)
    if ranks < len(hosts) or (here and math.ceil(ranks / here) != len(hosts)):
        given = f"--ranks={ranks}" + (f" and --ranks-per-host={here}" if here else "")
        text = f"{given} do not fill --hosts={parsed.hosts}, which has {counted(len(hosts), 'host')}"
        raise CheckpointConfigError(f"{text}; type --ranks={len(hosts) * (here or 8)}, or leave it out.")
    return hosts, ranks, math.ceil(ranks / len(hosts))


def _memory_every(parsed: argparse.Namespace, recovery: Recovery, step_s: float | None) -> float | None:
    """The time between snapshots for memory alone; None: there are none."""
    if parsed.memory_every is not None:
        return _time(parsed.memory_every, "--memory-every", "30s")
    if recovery.every_steps is None:
        return None
    if step_s is None:
        raise CheckpointConfigError(
            f"checkpoint.recovery.every_steps={recovery.every_steps} needs the time of a step; type --step=1.5s, or "
            "--memory-every=30s."
        )
    return recovery.every_steps * step_s


def _refuse_unfit_recovery(parsed: argparse.Namespace, config: _PlannedConfig) -> None:
    mode, sizes = config.recovery.mode, config.parts or PartSizes.of_preset(config.preset)
    if mode is not RecoveryMode.none and sizes.caller in ("inline", "temporal"):
        raise CheckpointConfigError(
            f"--recovery={mode} needs the writer process of checkpoint/caller=persistent, and {config.preset} has "
            f"{sizes.caller}; type --preset=async_persistent, or --recovery=none."
        )
    if mode is RecoveryMode.none and parsed.memory_every is not None:
        raise CheckpointConfigError(
            f"--memory-every={parsed.memory_every} needs a snapshot that stays in memory; type --recovery=host with it."
        )


def _time(text: str | None, name: str, example: str) -> float | None:
    return None if text is None else with_unit(text, SECONDS, name, example)


def _notes(question: Scenario, values: dict[str, float | None]) -> Iterator[str]:
    tier = "local.dir" if question.tiered else "storage"
    if values[f"{tier} rate"] is None:
        yield f"Without the rate of {tier}, a save is taken to be durable just before the next one."
    mode, asked = question.recovery.mode, question.recovery.replicas
    if mode is RecoveryMode.host:
        more = "" if question.hosts == 1 else " So does every failure of a run on several hosts."
        yield f"A failure that takes the host along goes back to the disk; training is reckoned for such ones.{more}"
    if mode is RecoveryMode.peers and not question.has_peers:
        yield "All ranks are on one host, so nobody has copies, and all is as with --recovery=host; --hosts=2 has two."
    if question.has_peers:
        yield "Training is reckoned for failures that go back to the disk; with copies, few do."
        if asked > question.hosts - 1:
            yield f"checkpoint.recovery.replicas={asked}: each host has its copies on {question.hosts - 1} others."
        yield from _strangers(question)
    if question.rates is not None:
        if question.rates.awaited and question.sizes.stager == "zero_overhead":
            yield "In the measured run, copies beside the steps cost more than waiting for them, so they were awaited."
        yield f"Measured: {question.rates.source}. It holds for the same machine, storage and number of ranks per host."
    if (interval := values["best interval"]) is not None:
        yield f"Set checkpoint.save.every_seconds={max(interval, 1):.0f}"


def _strangers(question: Scenario) -> Iterator[str]:
    """Hosts of `checkpoint.recovery.peers` that are not of the job."""
    given = question.recovery.peers or {}
    unknown = [name for name in dict.fromkeys([*given, *given.values()]) if name not in question.peers()]
    if unknown:
        names = ", ".join(unknown)
        yield f"checkpoint.recovery.peers names {names}, and no rank is there; --hosts names the hosts of the job."


def _lines(
    question: Scenario,
    figures: Sequence[Forecast],
    failures: Sequence[HostFailure],
    notes: Sequence[str],
    output: Output,
) -> Iterator[str]:
    ranks, hosts = counted(question.ranks, "rank"), counted(question.hosts, "host")
    recovery = "" if question.recovery.mode is RecoveryMode.none else f", recovery={question.recovery.mode}"
    yield f"{amount(round(question.state))} of state, {ranks} on {hosts}, {question.preset}{recovery}"
    yield ""
    room = width() - sum(max(map(len, cells)) + 2 for cells in zip(*((f.name, _text(f)) for f in figures), strict=True))
    rows = [("figure", "value", "formula or source")]
    for figure in figures:
        first, *others = textwrap.wrap(figure.why, room) or [""]
        rows += [(figure.name, _text(figure), first), *(("", "", line) for line in others)]
    yield from output.table(Table(rows, left=(0, 2)))
    yield from _peers(question, output)
    yield from _failures(failures, output)
    yield ""
    for line in DALY:
        yield from textwrap.wrap(line, width(), subsequent_indent="  ")
    yield ""
    for note in notes:
        yield from textwrap.wrap(note, width())


def _peers(question: Scenario, output: Output) -> Iterator[str]:
    peers = question.peers()
    if not peers:
        return
    yield ""
    shown = [*peers.items()][:_SHOWN]
    homes = {name: [home for home, others in peers.items() if name in others] for name, _ in shown}
    rows = [(name, ", ".join(others), ", ".join(homes[name]) or "nobody") for name, others in shown]
    yield from output.table(Table([("host", "its copies are on", "it has copies of"), *rows], left=(0, 1, 2)))
    if len(peers) > len(shown):
        yield f"and so on, {len(peers) - len(shown)} more; --json has all"


def _failures(failures: Sequence[HostFailure], output: Output) -> Iterator[str]:
    if not failures:
        return
    yield ""
    rows = [
        (
            each.lost,
            each.place,
            "?" if each.restore_s is None else duration(each.restore_s),
            "?" if each.repeated_s is None else duration(each.repeated_s),
            "" if each.steps is None else f"{each.steps:.1f} steps",
        )
        for each in failures
    ]
    yield from output.table(Table([("lost", "goes on from", "restore", "repeated", ""), *rows], left=(0, 1)))


def _text(figure: Forecast) -> str:
    if figure.value is None:
        return "?"
    if figure.unit == "of the time":
        return f"{100 * figure.value:.2f} %"
    if figure.unit == "s":
        return duration(figure.value)
    return f"{amount(round(figure.value))}{figure.unit.removeprefix('bytes')}"
