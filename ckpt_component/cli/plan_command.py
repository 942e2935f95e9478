"""`ckpt plan`: what saving will cost a run, from formulas or from what an earlier run measured.

Predict what saving costs a run: host memory, stall, time until durable, storage rate, the best interval, and the
fraction of time that is training. Every figure names its formula or source.

examples:
  ckpt plan --state 1.2TB --ranks 1024 --ranks-per-host 8 --storage-gbps 200
  ckpt plan --state 40GB --ranks 8 --measured checkpoints

?: a figure that needs another option.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ..config.config_files import parts_of, presets
from ..config.quantities import BYTES, SECONDS, quantity
from ..config.schema import GROUPS
from ..core.spelling import invalid_choice
from ..core.storage.space import amount
from ..errors import CheckpointConfigError
from .output import Output, width
from .planning.formulas import DALY
from .planning.measured import measured_rates
from .planning.plan import RESTART_S, Forecast, Scenario, plan
from .text import Table, counted, duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("--state", required=True, metavar="BYTES", help="the state of all ranks together, such as 1.2TB")
    add("--ranks", type=int, default=1, help="number of ranks (1)")
    add("--ranks-per-host", type=int, default=8, metavar="N", help="ranks on each host (8)")
    add("--preset", default="async_persistent", help="see ckpt presets (async_persistent)")
    add("--recovery", default="none", metavar="none|host", help="host: also keep the newest snapshot in memory (none)")
    add("--memory-every", metavar="TIME", help="time between snapshots for memory alone, as recovery.every_steps gives")
    add("--storage-gbps", type=float, metavar="GB/S", help="what the storage takes from all ranks, in GB/s")
    add("--mtbf", metavar="TIME", help="mean time between failures of the run, such as 8h")
    add("--restart-s", type=float, default=RESTART_S, metavar="S", help="from failure to training (300)")
    more = "rates of a run, from its checkpoint.dir; twice, with another size, is better"
    add("--measured", type=Path, action="append", metavar="FOLDER", help=more)


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Print the figures.

    Raises:
        CheckpointConfigError: an argument is invalid, or there are no measurements in the folder
    """
    question = _question(parsed)
    figures = plan(question)
    notes = list(_notes(question, {figure.name: figure.value for figure in figures}))
    data = {
        "question": {**asdict(question), "hosts": question.hosts},
        "figures": figures,
        "notes": notes,
    }
    output.result(data, _lines(question, figures, notes, output))


def _question(parsed: argparse.Namespace) -> Scenario:
    names = [file.name for file in presets() if file.name != "off"]
    if parsed.preset not in names:
        raise CheckpointConfigError(invalid_choice("--preset", parsed.preset, names))
    for name in ("ranks", "ranks_per_host", "storage_gbps", "restart_s"):
        if getattr(parsed, name) is not None:
            _refuse_below_zero(f"--{name.replace('_', '-')}", getattr(parsed, name))
    modes = [mode for mode in GROUPS["recovery"] if mode != "peers"]
    if parsed.recovery not in modes:
        raise CheckpointConfigError(invalid_choice("--recovery", parsed.recovery, modes))
    _refuse_unfit_recovery(parsed)
    folders = [folder.expanduser() for folder in parsed.measured or ()]
    return Scenario(
        state=_with_unit(parsed.state, BYTES, "--state", "1.2TB"),
        ranks=parsed.ranks,
        ranks_per_host=parsed.ranks_per_host,
        preset=parsed.preset,
        storage=None if parsed.storage_gbps is None else parsed.storage_gbps * 1e9,
        mtbf=_time(parsed.mtbf, "--mtbf", "8h"),
        restart_s=parsed.restart_s,
        recovery=parsed.recovery == "host",
        memory_every=_time(parsed.memory_every, "--memory-every", "30s"),
        rates=measured_rates(folders, parsed.preset) if folders else None,
    )


def _refuse_unfit_recovery(parsed: argparse.Namespace) -> None:
    caller = parts_of(parsed.preset)["caller"]
    if parsed.recovery == "host" and caller != "persistent":
        raise CheckpointConfigError(
            f"--recovery=host needs the writer process of checkpoint/caller=persistent, and {parsed.preset} has "
            f"{caller}; type --preset=async_persistent, or --recovery=none."
        )
    if parsed.recovery == "none" and parsed.memory_every is not None:
        raise CheckpointConfigError(
            f"--memory-every={parsed.memory_every} needs a snapshot that stays in memory; type --recovery=host with it."
        )


def _time(text: str | None, name: str, example: str) -> float | None:
    return None if text is None else _with_unit(text, SECONDS, name, example)


def _with_unit(text: str, unit: str, name: str, example: str) -> float:
    if text.replace(".", "").isdigit():
        raise CheckpointConfigError(f"{name}={text} has no unit; type one, as in {name}={example}.")
    value = quantity(text, unit, name)
    _refuse_below_zero(name, value)
    return value


def _refuse_below_zero(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise CheckpointConfigError(f"{name}={value:g} must be above 0.")


def _notes(question: Scenario, values: dict[str, float | None]) -> Iterator[str]:
    if values["storage rate"] is None:
        yield "Without the storage's rate, a save is taken to be durable just before the next one."
    if question.recovery:
        more = "" if question.hosts == 1 else " So does every failure of a run on several hosts."
        yield f"A failure that takes the host along goes back to the disk; training is reckoned for such ones.{more}"
    if question.rates is not None:
        if question.rates.awaited and question.preset == "async_zero_overhead":
            yield "In the measured run, copies beside the steps cost more than waiting for them, so they were awaited."
        yield f"Measured: {question.rates.source}. It holds for the same machine, storage and number of ranks per host."
    if (interval := values["best interval"]) is not None:
        yield f"Set checkpoint.save.every_seconds={max(interval, 1):.0f}"


def _lines(question: Scenario, figures: Sequence[Forecast], notes: Sequence[str], output: Output) -> Iterator[str]:
    ranks, hosts = counted(question.ranks, "rank"), counted(question.hosts, "host")
    yield f"{amount(round(question.state))} of state, {ranks} on {hosts}, {question.preset}"
    yield ""
    room = width() - sum(max(map(len, cells)) + 2 for cells in zip(*((f.name, _text(f)) for f in figures), strict=True))
    rows = [("figure", "value", "formula or source")]
    for figure in figures:
        first, *others = textwrap.wrap(figure.why, room) or [""]
        rows += [(figure.name, _text(figure), first), *(("", "", line) for line in others)]
    yield from output.table(Table(rows, left=(0, 2)))
    yield ""
    for line in DALY:
        yield from textwrap.wrap(line, width(), subsequent_indent="  ")
    yield ""
    for note in notes:
        yield from textwrap.wrap(note, width())


def _text(figure: Forecast) -> str:
    if figure.value is None:
        return "?"
    if figure.unit == "of the time":
        return f"{100 * figure.value:.2f} %"
    if figure.unit == "s":
        return duration(figure.value)
    return f"{amount(round(figure.value))}{figure.unit.removeprefix('bytes')}"
