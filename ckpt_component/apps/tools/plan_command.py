"""`ckpt plan`: what saving will cost a run, from formulas or from what an earlier run measured."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ...config.files import presets
from ...config.quantities import BYTES, SECONDS, quantity
from ...errors import CheckpointConfigError
from ...spelling import closest
from ...storage.space import amount
from ..planning.formulas import DALY
from ..planning.measured import measured_rates
from ..planning.plan import RESTART_S, Figure, Question, plan
from .output import WIDTH, Output, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Predict what saving costs a run: host memory, stall, time until durable, storage rate, the best interval, and "
        "the fraction of time that is training. Every figure names its formula or source."
    )
    parser.epilog = (
        "examples:\n  ckpt plan --state 1.2TB --ranks 1024 --ranks-per-host 8 --storage-gbps 200 --step-s 8\n"
        "  ckpt plan --state 40GB --ranks 8 --measured checkpoints"
    )
    parser.add_argument(
        "--state", required=True, metavar="BYTES", help="the state of all ranks together, such as 1.2TB"
    )
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks (1)")
    parser.add_argument("--ranks-per-host", type=int, default=8, metavar="N", help="ranks on each host (8)")
    parser.add_argument("--preset", default="async_persistent", help="see ckpt presets (async_persistent)")
    parser.add_argument(
        "--storage-gbps", type=float, metavar="GB/S", help="what the storage takes from all ranks, in GB/s"
    )
    parser.add_argument("--mtbf", metavar="TIME", help="mean time between failures of the run, such as 8h")
    parser.add_argument(
        "--restart-s", type=float, default=RESTART_S, metavar="S", help="from failure to training (300)"
    )
    parser.add_argument("--step-s", type=float, metavar="S", help="seconds per training step")
    parser.add_argument(
        "--measured",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="rates of a run (its checkpoint.dir) or of ckpt-bench's output; twice, with another size, is better",
    )


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Print the figures.

    Raises:
        CheckpointConfigError: An argument is invalid, or there are no measurements in the folder.
    """
    question = _question(parsed)
    figures = plan(question)
    by_name = {figure.name: figure.value for figure in figures}
    interval = by_name["best interval"]
    every = None if interval is None or question.step_s is None else max(round(interval / question.step_s), 1)
    notes = list(_notes(question, by_name, every))
    data = {
        "question": {**asdict(question), "hosts": question.hosts},
        "figures": [asdict(figure) for figure in figures],
        "every_steps": every,
        "notes": notes,
    }
    output.result(data, lambda: _lines(question, figures, notes))


def _question(parsed: argparse.Namespace) -> Question:
    state = quantity(parsed.state, BYTES, "--state")
    if state < 1e5 and parsed.state.strip().replace(".", "").isdigit():
        raise CheckpointConfigError(f"--state={parsed.state} has no unit; type one, such as --state={parsed.state}TB.")
    names = [file.name for file in presets()]
    if parsed.preset not in names:
        near = closest(parsed.preset, names)
        hint = f"did you mean --preset {near}?" if near else f"they are {', '.join(names)}."
        raise CheckpointConfigError(f"There is no preset {parsed.preset}; {hint}")
    if parsed.preset == "off":
        raise CheckpointConfigError(
            "The preset off saves nothing; plan for another, such as --preset async_persistent."
        )
    for name in ("ranks", "ranks_per_host", "storage_gbps", "step_s", "restart_s"):
        value = getattr(parsed, name)
        if value is not None and not 0 < value < float("inf"):
            raise CheckpointConfigError(f"--{name.replace('_', '-')}={value:g} must be above 0.")
    mtbf = None if parsed.mtbf is None else float(quantity(parsed.mtbf, SECONDS, "--mtbf"))
    for name, value in (("--state", state), ("--mtbf", mtbf)):
        if value is not None and value <= 0:
            raise CheckpointConfigError(f"{name}={value:g} must be above 0.")
    return Question(
        state=state,
        ranks=parsed.ranks,
        ranks_per_host=parsed.ranks_per_host,
        preset=parsed.preset,
        storage=None if parsed.storage_gbps is None else parsed.storage_gbps * 1e9,
        mtbf=mtbf,
        step_s=parsed.step_s,
        restart_s=parsed.restart_s,
        rates=None if parsed.measured is None else measured_rates(_expanded(parsed.measured), parsed.preset),
    )


def _expanded(folders: Sequence[Path]) -> list[Path]:
    return [folder.expanduser() for folder in folders]


def _notes(question: Question, values: dict[str, float | None], every: int | None) -> Iterator[str]:
    copy, interval, rate = values.get("copy beside steps"), values["best interval"], values["storage rate"]
    if copy and question.step_s and copy > question.step_s:
        yield f"The copy takes longer than a step of {question.step_s:g} s: the optimizer waits for the rest of it."
    mtbf = values["MTBF"] or 0.0
    if mtbf < question.restart_s:
        hint = "; a unit may be missing, as in --mtbf 8h" if question.mtbf else ""
        yield f"Failures come every {mtbf:.3g} s, faster than a restart of {question.restart_s:g} s{hint}."
    if interval is not None and rate is not None and interval == values["durable"]:
        yield "The storage bounds the interval; with more GB/s, saves could be as frequent as failures ask for."
    if rate is None:
        yield "Without the storage's rate, a save is taken to be durable just before the next one."
    if question.overlap_given_up and question.preset == "async_zero_overhead":
        yield "In the measured run, copies beside the steps cost more than waiting for them, so they were awaited."
    if question.rates is not None:
        others = [preset for preset in question.rates.presets if preset != question.preset]
        if others:
            yield f"The measured run used {', '.join(others)}; measure with {question.preset} for a better prediction."
        yield f"Measured: {question.rates.source}. It holds for the same machine, storage and number of ranks per host."
    if interval is not None:
        yield (
            f"Set checkpoint.save.every_steps={every}"
            if every
            else f"Set checkpoint.save.every_seconds={max(interval, 1):.0f}"
        )


def _lines(question: Question, figures: Sequence[Figure], notes: Sequence[str]) -> Iterator[str]:
    hosts = f"{question.hosts} host{'s' if question.hosts > 1 else ''}"
    ranks = f"{question.ranks} rank{'s' if question.ranks > 1 else ''}"
    yield f"{amount(round(question.state))} of state, {ranks} on {hosts}, {question.preset}"
    yield ""
    rows = [(figure.name, _text(figure), figure.why) for figure in figures]
    yield from table(("figure", "value", "formula or source"), rows, right=(1,))
    yield ""
    yield from DALY
    yield ""
    for note in notes:
        yield from textwrap.wrap(note, WIDTH)


def _text(figure: Figure) -> str:
    value = figure.value
    if value is None:
        return "?"
    if figure.unit == "bytes":
        return amount(round(value))
    if figure.unit == "bytes/s":
        return f"{amount(round(value))}/s"
    if figure.unit == "of the time":
        return f"{100 * value:.2f} %"
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= 2 * length:
            return f"{value / length:.1f} {unit}"
    return f"{value:.3g} s"
