"""`ckpt tune FOLDER`: measure the best settings for a machine, folder and state size, and write them as a recipe."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import psutil

from ckpt_component.cli.output import Output
from ckpt_component.config import resolve_config
from ckpt_component.config.hydra.hydra_errors import HydraConfigError
from ckpt_component.config.quantities import BYTES, quantity
from ckpt_component.core.spelling import invalid_choice
from ckpt_component.core.storage.locate import expanded

from ..place import place
from ..schema import STATES
from .questions import questions
from .recipe import recipe_path, write_recipe
from .tune import ROUNDS, tune

#: Memory as a multiple of the state: the state, two snapshots (zero_overhead has two arenas), and a margin.
_IN_MEMORY = 3.3
#: Disk space as a multiple of the state: one checkpoint, and one that is being removed.
_ON_DISK = 2.1
#: Saves of smaller states are too fast to measure.
_LEAST_BYTES = 1_000_000


def tune_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where checkpoints will be")
    parser.add_argument("--state", default="large", help=f"kind of state: {', '.join(STATES)} (large)")
    parser.add_argument("--size", metavar="BYTES", help="its size, such as 4GB (that of the kind)")
    parser.add_argument("--seconds", type=float, default=180.0, help="time to spend, roughly (180)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds per setting, at least 2 (3)")
    parser.add_argument(
        "--preset", default="async_persistent", choices=["async_persistent", "async_temporal"], help="preset to tune"
    )
    parser.add_argument("--writers", metavar="A,B", help="formats to choose from (only that of the preset)")
    parser.add_argument("--name", default="tuned", help="name of the recipe (tuned)")
    parser.add_argument("--conf", type=Path, default=Path("tuned"), help="configs folder for recipe/NAME.yaml")
    parser.add_argument("--replace", action="store_true", help="overwrite a recipe of that name")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="checkpoint.KEY=VALUE",
        help="a fixed setting, which also goes into the recipe; may be repeated",
    )


def run_tune(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt tune FOLDER`: measure the best settings for a machine, folder and state size, and write them as a recipe.

    Measure parallel writers, block sizes, direct I/O, stagers, and with --writers formats in FOLDER, in turn and
    repeatedly, explain each choice, and write a recipe. Checkpoints written into FOLDER are removed.

    Example:
      ckpt tune checkpoints --size 4GB --seconds 300
    """
    with redirect_stdout(sys.stderr) if output.as_json else nullcontext():
        data = _measured(parsed)
    output.result(data, _lines(parsed, data))


def _measured(parsed: argparse.Namespace) -> dict[str, Any]:
    # Spinning threads of torch starve other processes on shared cores; torch reads this when imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    from .measure import Trial

    if parsed.state not in STATES:
        raise HydraConfigError(invalid_choice("--state", parsed.state, list(STATES)))
    if not parsed.seconds > 0:
        raise HydraConfigError(f"--seconds={parsed.seconds:g} must be above 0; the default is 180.")
    folder = Path(expanded(str(parsed.folder), "FOLDER"))
    path = recipe_path(parsed.conf, parsed.name, parsed.replace)
    writers = parsed.writers.split(",") if parsed.writers else []
    for override in parsed.override:
        if not override.startswith(("checkpoint.", "checkpoint/")):
            raise HydraConfigError(f"--override={override} must be like checkpoint.writer.checksum=auto.")
    fixed = [*parsed.override, *(f"checkpoint/writer={writer}" for writer in writers if len(writers) == 1)]
    for overrides in (fixed, *([f"checkpoint/writer={writer}"] for writer in writers)):
        resolve_config(parsed.preset, overrides)
    if parsed.repeats < ROUNDS:
        raise HydraConfigError(f"--repeats={parsed.repeats} cannot be told from noise; type {ROUNDS} or more.")
    nbytes = None if parsed.size is None else int(quantity(parsed.size, BYTES, "--size"))
    size = STATES[parsed.state] * 1e9 if nbytes is None else nbytes
    _refuse_size(size, parsed.size, folder)
    about = f"{size / 1e9:.2f} GB of state ({parsed.state})"
    print(f"{about} in {folder}, {parsed.preset}, {parsed.seconds:g} s", flush=True)
    settings = dict(override.split("=", 1) for override in fixed)
    open_questions = [item for item in questions(len(os.sched_getaffinity(0)), writers) if item.key not in settings]
    with place(folder, "the folder ") as base:
        trial = Trial(parsed.state, nbytes, parsed.preset, base)
        answers = tune(trial, open_questions, fixed, seconds=parsed.seconds, repeats=parsed.repeats)
    settings |= {answer.key: answer.value for answer in answers}
    notes = [f"for any app on this machine: {about}, measured by ckpt tune"]
    notes += [f"{answer.key}={answer.value}: {answer.reason}" for answer in answers]
    if settings.get("checkpoint/stager") == "zero_overhead":
        notes.append("zero_overhead has two snapshots in memory, and needs guard(optimizer)")
    write_recipe(path, parsed.preset, settings, notes)
    return {
        "recipe": str(path),
        "state": parsed.state,
        "state_bytes": int(size),
        "preset": parsed.preset,
        "settings": settings,
        "answers": answers,
    }


def _lines(parsed: argparse.Namespace, data: dict[str, Any]) -> Iterator[str]:
    yield from ("", f"written: {data['recipe']}", "")
    yield from Path(data["recipe"]).read_text(encoding="utf-8").splitlines()
    yield ""
    yield f"ckpt-train --config-dir {parsed.conf} +recipe={parsed.name}    # or any Hydra app that has checkpoint"
    yield (
        f'build_manager("{parsed.preset}", overrides=["hydra.searchpath=[file://{parsed.conf.resolve()}]", '
        f'"+recipe={parsed.name}"])    # compose_checkpoint the same'
    )


def _refuse_size(size: float, text: str | None, folder: Path) -> None:
    if not folder.is_dir():
        raise HydraConfigError(f"{folder} is not a folder; give the one where checkpoints will be, such as '.'.")
    if size < _LEAST_BYTES:
        raise HydraConfigError(f"--size={text} is too little to measure; type a unit, such as --size=4GB.")
    for free, needed, where in (
        (psutil.virtual_memory().available, _IN_MEMORY * size, "of memory"),
        (psutil.disk_usage(str(folder)).free, _ON_DISK * size, f"in {folder}"),
    ):
        if free < needed:
            raise HydraConfigError(
                f"{size / 1e9:.2f} GB of state need {needed / 1e9:.1f} GB {where}, and {free / 1e9:.1f} are free; "
                f"type a smaller --size."
            )
