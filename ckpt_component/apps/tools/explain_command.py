"""`ckpt explain [PRESET] [OVERRIDES...]`: what the factory would build, and where each choice comes from."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ...config.compose import compose_checkpoint
from ...config.keys import keys, typed_value
from ...config.origins import DEFAULT, Origins, origins_of
from ...config.quantities import BYTES, quantity
from ...config.resolve import resolve_config
from ...config.rules import PartFacts, refuse_unfit
from ...config.schema import PARTS, Checkpoint
from ...errors import CheckpointConfigError
from .explain_graph import automatic, facts_of, host_memory, processes, waits
from .output import WIDTH, Output, table

#: The preset that is explained if none is named.
USUAL = "async_persistent"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Show what a config builds, without building it: parts and where each choice comes from, what is decided "
        "automatically, processes, host memory, and what training waits for. Takes a second: Hydra composes."
    )
    parser.epilog = (
        "examples:\n  ckpt explain async_zero_overhead checkpoint.writer.workers=4 --state 10GB\n"
        "  ckpt explain +recipe=safest checkpoint/stager=pinned\n"
        "  ckpt explain mine 'hydra.searchpath=[file://conf]'     # your own conf/checkpoint/mine.yaml"
    )
    parser.add_argument(
        "words", nargs="*", metavar="PRESET | OVERRIDE", help=f"a preset ({USUAL}), and overrides as for Hydra"
    )
    parser.add_argument("--state", metavar="BYTES", help="state of a rank, such as 10GB, for host memory in numbers")


def run(parsed: argparse.Namespace, output: Output) -> None:
    """Print the graph.

    Raises:
        CheckpointConfigError: An override is invalid, or the parts do not fit together, as the factory says.
    """
    preset, overrides = _split(parsed.words)
    state = None if parsed.state is None else quantity(parsed.state, BYTES, "--state")
    settings = resolve_config(compose_checkpoint(preset, overrides))
    parts, origins = facts_of(settings), origins_of(preset, overrides)
    if settings.enabled:
        refuse_unfit(settings, parts)
    folder = os.path.abspath(settings.dir)
    picked = origins.choices["checkpoint"] if origins.preset != preset else DEFAULT if preset == USUAL else "argument"
    data = {
        "preset": origins.preset,
        "origin": picked,
        "enabled": settings.enabled,
        "dir": folder,
        "parts": _parts(settings, parts, origins),
        "set": _set(settings, origins),
        "automatic": [asdict(item) for item in automatic(settings, parts, folder)],
        "processes": list(processes(settings, parts)),
        "host_memory": list(host_memory(settings, parts, state)),
        "waits": list(waits(settings, parts)),
    }
    output.result(data, lambda: _lines(data, output))


def _split(words: list[str]) -> tuple[str, list[str]]:
    """The preset and the overrides; `checkpoint=sync` is a preset too, as on the command line of an app."""
    plain = [word for word in words if "=" not in word and not word.startswith("~")]
    picks = [word for word in words if word.startswith(("checkpoint=", "+checkpoint="))]
    names = [*plain, *(word.partition("=")[2] for word in picks)]
    if len(names) > 1:
        raise CheckpointConfigError(
            f"{' and '.join(names)} are two presets; give one, and overrides such as checkpoint/stager=pinned."
        )
    return (names or [USUAL])[0], [word for word in words if word not in (*plain, *picks)]


def _parts(settings: Checkpoint, facts: PartFacts, origins: Origins) -> dict[str, Any]:
    parts = {}
    for kind in PARTS:
        plain = getattr(settings, kind)
        values = {
            key: {"value": value, "origin": _origin(origins, f"checkpoint.{kind}.{key}")}
            for key, value in plain.items()
            if key != "_target_"
        }
        target = str(plain["_target_"])
        parts[kind] = {
            "option": getattr(facts, kind),
            "class": target,
            "origin": origins.choices.get(f"checkpoint/{kind}", DEFAULT),
            "keys": values,
        }
    return parts


def _set(settings: Checkpoint, origins: Origins) -> dict[str, Any]:
    """Keys of `checkpoint` itself that a file or an override sets."""
    found = {}
    for key in keys():
        origin = DEFAULT if key.option else _origin(origins, f"checkpoint.{key.name}")
        if origin != DEFAULT:
            value: Any = settings
            for name in key.name.split("."):
                value = getattr(value, name)
            plain = value if isinstance(value, (int, float, str, list, type(None))) else str(value)
            found[f"checkpoint.{key.name}"] = {"value": plain, "origin": origin}
    return found


def _origin(origins: Origins, key: str) -> str:
    """Where a key was set, itself or as a part of a dict."""
    while "." in key:
        if key in origins.values:
            return origins.values[key]
        key = key.rpartition(".")[0]
    return DEFAULT


def _lines(data: Mapping[str, Any], output: Output) -> Iterator[str]:
    yield f"{output.style('checkpoint=' + data['preset'], 'bold')}  ({data['origin']}), dir {data['dir']}"
    if not data["enabled"]:
        yield "checkpoint.enabled=false: the manager saves and restores nothing, and builds none of these parts."
        return
    rows = []
    for kind, part in data["parts"].items():
        rows.append((kind, part["option"], part["origin"]))
        for key, entry in part["keys"].items():
            rows.append((f"  {key}", typed_value(entry["value"]), entry["origin"]))
    yield from table(("part", "value", "from"), rows)
    if data["set"]:
        yield ""
        rows = [
            (key.removeprefix("checkpoint."), typed_value(entry["value"]), entry["origin"])
            for key, entry in data["set"].items()
        ]
        yield from table(("set", "value", "from"), rows)
    yield ""
    rows = [(item["key"].removeprefix("checkpoint."), item["value"], item["why"]) for item in data["automatic"]]
    yield from table(("automatic", "value", "because"), rows)
    for title, name in (
        ("processes and threads of a rank", "processes"),
        ("host memory of a rank", "host_memory"),
        ("training waits", "waits"),
    ):
        yield ""
        yield output.style(title, "bold")
        for line in data[name]:
            yield from textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ")
