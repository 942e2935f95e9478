"""`ckpt explain [PRESET] [OVERRIDES...]`: what the factory would build, and where each choice comes from.

Show what a config builds, without building it: parts and where each choice comes from, processes and threads, and what
training waits for. Takes a second: Hydra composes.

examples:
  ckpt explain async_zero_overhead checkpoint.writer.workers=4
  ckpt explain +recipe=safest checkpoint/stager=pinned
  ckpt explain mine 'hydra.searchpath=[file://conf]'   # your mine.yaml
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from ..config.hydra.compose import compose_checkpoint
from ..config.hydra.origins import DEFAULT, Origins, origins_of
from ..config.hydra.resolve import resolve_config
from ..config.keys import keys, typed_value
from ..config.rules import PartFacts, refuse_unfit
from ..config.schema import PARTS, SETTINGS, Checkpoint
from ..core.storage.locate import absolute
from .config_words import USUAL, split_words
from .explain_graph import facts_of, processes, waits
from .output import Output, width
from .text import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "words", nargs="*", metavar="PRESET | OVERRIDE", help=f"a preset ({USUAL}), and overrides as for Hydra"
    )


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Print the graph.

    Raises:
        CheckpointConfigError: an override is invalid, or the parts do not fit together, as the factory says
    """
    preset, overrides = split_words(parsed.words)
    settings = resolve_config(compose_checkpoint(preset, overrides))
    facts, origins = facts_of(settings), origins_of(preset, overrides)
    if settings.enabled:
        refuse_unfit(settings, facts)
    picked = origins.choices["checkpoint"] if origins.preset != preset else DEFAULT if preset == USUAL else "argument"
    data = {
        "preset": origins.preset,
        "origin": picked,
        "enabled": settings.enabled,
        "dir": absolute(settings.dir),
        "parts": {kind: _part(kind, settings, facts, origins) for kind in PARTS},
        "groups": {name: _group(name, settings, origins) for name in SETTINGS},
        "set": _set(settings, origins),
        "processes": list(processes(settings, facts)),
        "waits": list(waits(settings, facts)),
    }
    output.result(data, _lines(data, output))


def _part(kind: str, settings: Checkpoint, facts: PartFacts, origins: Origins) -> dict[str, Any]:
    plain = dict(getattr(settings, kind))
    return {
        "option": getattr(facts, kind),
        "class": plain.pop("_target_"),
        "origin": origins.choices.get(f"checkpoint/{kind}", DEFAULT),
        "keys": {
            key: {"value": value, "origin": origins.of(f"checkpoint.{kind}.{key}")} for key, value in plain.items()
        },
    }


def _group(name: str, settings: Checkpoint, origins: Origins) -> dict[str, Any]:
    """The option of a group of keys, which its key `mode` names, and the other keys."""
    names = [key.name for key in keys() if key.name.startswith(f"{name}.")]
    entries = {
        key.removeprefix(f"{name}."): {
            "value": _plain(attrgetter(key)(settings)),
            "origin": origins.of(f"checkpoint.{key}"),
        }
        for key in names
    }
    mode = entries.pop("mode")
    by_option = mode["origin"] in (DEFAULT, f"{name} {mode['value']}")  # not set by itself
    origin = origins.choices.get(f"checkpoint/{name}", DEFAULT) if by_option else mode["origin"]
    return {"option": mode["value"], "origin": origin, "keys": entries}


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    return value if isinstance(value, (int, float, str, list, type(None))) else str(value)


def _set(settings: Checkpoint, origins: Origins) -> dict[str, Any]:
    """Keys of `checkpoint` itself that a file or an override sets, but for those of a group."""
    found = {}
    for name in (key.name for key in keys() if not key.option and key.name.partition(".")[0] not in SETTINGS):
        value, origin = attrgetter(name)(settings), origins.of(f"checkpoint.{name}")
        if origin != DEFAULT:
            found[f"checkpoint.{name}"] = {"value": _plain(value), "origin": origin}
    return found


def _lines(data: Mapping[str, Any], output: Output) -> Iterator[str]:
    yield f"{output.style('checkpoint=' + data['preset'], 'bold')}  ({data['origin']}), dir {data['dir']}"
    if not data["enabled"]:
        yield "checkpoint.enabled=false: the manager saves and restores nothing, and builds none of these parts."
        return
    rows = [("part", "value", "from")]
    for name, chosen in (data["parts"] | data["groups"]).items():
        rows.append((name, chosen["option"], chosen["origin"]))
        rows += [(f"  {key}", *_typed(entry)) for key, entry in chosen["keys"].items()]
    yield from output.table(Table(rows, left=(0, 1, 2)))
    if data["set"]:
        yield ""
        rows = [("set", "value", "from")]
        rows += [(key.removeprefix("checkpoint."), *_typed(entry)) for key, entry in data["set"].items()]
        yield from output.table(Table(rows, left=(0, 1, 2)))
    for title, name in (("processes and threads of a rank", "processes"), ("training waits", "waits")):
        yield ""
        yield output.style(title, "bold")
        for line in data[name]:
            yield from textwrap.wrap(line, width(), initial_indent="  ", subsequent_indent="    ")


def _typed(entry: Mapping[str, Any]) -> tuple[str, str]:
    return typed_value(entry["value"]), entry["origin"]
