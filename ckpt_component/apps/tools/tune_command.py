"""`ckpt tune FOLDER`: the settings that suit this machine, this folder and this size of state, as a recipe."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ...config.errors import HydraConfigError
from ...config.quantities import BYTES, quantity
from ...spelling import other_word

#: The state, two snapshots of it (zero_overhead has two arenas), and a margin.
_IN_MEMORY = 3.3
#: Files of one checkpoint, and one that is being removed.
_ON_DISK = 2.1
#: The most of the time that copies in memory are measured for.
_MEMORY_SHARE = 0.1
#: Formats with one file per rank.
_SAME_RANKS = ("torch_save", "safetensors")
#: Smaller states are saved too quickly to measure.
_LEAST = 1_000_000


def add(commands: Any) -> None:
    """Add the command to the parser of `ckpt`."""
    parser = commands.add_parser(
        "tune",
        help="measure which settings suit this machine, a folder and a size of state, and write them as a recipe",
        description="Measure parallel writers, block sizes, direct I/O, stagers, and with --writers formats in "
        "FOLDER, one after the other with interleaved repeats, say why what is chosen, and write a recipe. What it "
        "writes into FOLDER is removed.",
    )
    parser.add_argument("folder", type=Path, help="where checkpoints will be")
    parser.add_argument("--state", default="large", help="kind of state: large, many_small, moe, bf16_mixed, tiny")
    parser.add_argument("--size", metavar="BYTES", help="its size, such as 4GB or 500MiB; otherwise as the kind has it")
    parser.add_argument("--seconds", type=float, default=180.0, help="how long it may take (180)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds per setting, at least 2 (3)")
    parser.add_argument(
        "--preset", default="async_persistent", choices=["async_persistent", "async_temporal"], help="what is tuned"
    )
    parser.add_argument("--writers", metavar="A,B", help="formats to choose from; otherwise that of the preset stays")
    parser.add_argument("--name", default="tuned", help="of the recipe (default tuned)")
    parser.add_argument("--conf", type=Path, default=Path("tuned"), help="folder of configs that gets recipe/NAME.yaml")
    parser.add_argument("--replace", action="store_true", help="write over a recipe of that name")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="checkpoint.KEY=VALUE",
        help="a setting that stays as given and goes into the recipe; may come several times",
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    """Measure, tell, and write the recipe.

    Raises:
        CheckpointConfigError: an argument that cannot be used; the text says what to type instead.
    """
    from ..tuning.memory import memory_advice
    from ..tuning.recipe import recipe_path, write_recipe
    from ..tuning.tune import Wish, tune

    path = recipe_path(parsed.conf, parsed.name, parsed.replace)
    writers = [] if parsed.writers is None else _writers(parsed.writers)
    wish = Wish(
        folder=_folder(parsed.folder),
        state=parsed.state,
        nbytes=None if parsed.size is None else _bytes(parsed.size),
        seconds=_above(0.0, "--seconds", parsed.seconds),
        repeats=int(_above(1, "--repeats", parsed.repeats)),
        preset=parsed.preset,
        writers=writers,
        fixed=[*parsed.override, *(f"checkpoint/writer={writer}" for writer in writers if len(writers) == 1)],
    )
    size = _refuse_too_large(wish.state, wish.nbytes, wish.folder)
    _refuse_overrides(wish.preset, wish.fixed)
    print(
        f"{size / 1e9:.2f} GB of state ({wish.state}) in {wish.folder}, {wish.preset}, {wish.seconds:g} s", flush=True
    )
    memory = memory_advice(os.environ, _MEMORY_SHARE * wish.seconds)
    answers = tune(wish, lambda text: print(text, flush=True))
    if memory is not None:
        print(f"\n{memory}")
    settings = dict(override.split("=", 1) for override in wish.fixed)
    settings |= {answer.key: answer.value for answer in answers}
    about = f"for any app on this machine: {size / 1e9:.2f} GB of state ({wish.state}), measured by ckpt tune"
    notes = [about, *(f"{answer.key}={answer.value}: {answer.reason}" for answer in answers)]
    if memory is not None:
        notes.append(memory)
    if settings.get("checkpoint/writer", "dcp") in _SAME_RANKS:
        notes.append(
            f"files of {settings['checkpoint/writer']} load on the same number of ranks alone, those of dcp on any"
        )
        print(f"\n{notes[-1]}")
    if settings.get("checkpoint/stager") == "zero_overhead":
        notes.append("zero_overhead has two snapshots in memory, and needs guard(optimizer)")
    write_recipe(path, wish.preset, settings, notes, parsed.replace)
    print(f"\nwritten: {path}\n\n{path.read_text(encoding='utf-8')}")
    print(f"ckpt-train --config-dir {parsed.conf} +recipe={parsed.name}    # or any Hydra app that has checkpoint")
    print(
        f'build_manager("{wish.preset}", overrides=["hydra.searchpath=[file://{parsed.conf.resolve()}]", '
        f'"+recipe={parsed.name}"])    # compose_checkpoint the same'
    )


def _folder(folder: Path) -> Path:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise HydraConfigError(f"{folder} {what}; give the folder where checkpoints will be, such as '.'.")
    return folder


def _bytes(text: str) -> int:
    size = int(quantity(text, BYTES, "--size"))
    if size < _LEAST:
        unit = f"; type a unit, such as --size={text}GB" if text.isdecimal() else ""
        raise HydraConfigError(f"--size={text} is {size} bytes, too few to measure anything{unit or '.'}")
    return size


def _above(limit: float, option: str, value: float) -> float:
    if not value > limit or value == float("inf"):
        raise HydraConfigError(f"{option}={value:g} is out of range; it must be a finite number above {limit:g}.")
    return value


def _writers(text: str) -> list[str]:
    from ...config.schema import PARTS

    writers = list(dict.fromkeys(text.split(",")))
    for writer in writers:
        if writer not in PARTS["writer"]:
            raise HydraConfigError(other_word("--writers", writer, list(PARTS["writer"])))
    return writers


def _refuse_overrides(preset: str, overrides: Sequence[str]) -> None:
    from ...config import resolve_config

    for override in overrides:
        if not override.startswith(("checkpoint.", "checkpoint/")) or "=" not in override:
            raise HydraConfigError(
                f"--override={override} is no setting of checkpoint; type such as checkpoint.writer.checksum=auto."
            )
    resolve_config(preset, overrides)


def _refuse_too_large(state: str, nbytes: int | None, folder: Path) -> float:
    """The size of the state."""
    from ..bench.schema import STATES

    if state not in STATES:
        raise HydraConfigError(other_word("--state", state, list(STATES)))
    size = nbytes or STATES[state] * 1e9
    for free, needed, what in (
        (psutil.virtual_memory().available, _IN_MEMORY * size, "of memory"),
        (psutil.disk_usage(str(folder)).free, _ON_DISK * size, f"in {folder}"),
    ):
        if free < needed:
            raise HydraConfigError(
                f"{size / 1e9:.2f} GB of state need {needed / 1e9:.1f} GB {what}, and {free / 1e9:.1f} are free; "
                f"type a smaller --size."
            )
    return size
