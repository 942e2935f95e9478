"""`ckpt explain`: what the factory would build from a config, in words, and where each choice comes from."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

from ..config.hydra.compose import compose_checkpoint
from ..config.hydra.origins import DEFAULT, Origins, origins_of
from ..config.hydra.parts import part_class
from ..config.hydra.resolve import resolve_config
from ..config.keys import keys, typed_value
from ..config.rules import PartFacts, deadlines, refuse_unfit
from ..config.schema import PARTS, SETTINGS, Checkpoint, part_option
from ..core.options import DeltaMode, RecoveryMode
from ..core.storage.locate import absolute
from .config_words import USUAL, split_words
from .output import Output, Table, width
from .plan_scenario import PartSizes


@dataclass(frozen=True)
class ComposedConfig:
    """A config, and what is known of its parts.

    Attributes:
        words: the preset and the overrides that make it
        settings: what it says
        facts: what the rules ask of the parts
    """

    words: tuple[str, list[str]]
    settings: Checkpoint
    facts: PartFacts

    @cached_property
    def preset(self) -> str:
        """The preset, which a recipe may have chosen."""
        return origins_of(*self.words).preset

    @property
    def sizes(self) -> PartSizes:
        """What a plan asks of the parts; a stager of the user takes one image, unless its `arenas` say more."""
        writer, takes = self.settings.writer, self.facts.takes_snapshot
        return PartSizes(
            self.facts.stager,
            self.facts.caller,
            self.settings.stager.get("arenas", 1) if takes else 0,
            2 * writer.get("workers", 1) * writer.get("block_bytes", 0),
        )


def composed(words: Sequence[str]) -> ComposedConfig:
    """The config of a preset and overrides.

    Raises:
        CheckpointConfigError: an override is invalid, or the parts do not fit together, as the factory says
    """
    preset_and_overrides = split_words(words)
    settings = resolve_config(compose_checkpoint(*preset_and_overrides))
    facts = facts_of(settings)
    refuse_unfit(settings, facts)
    return ComposedConfig(preset_and_overrides, settings, facts)


def facts_of(settings: Checkpoint) -> PartFacts:
    """What the rules ask of the parts. Our own need not be imported, which would import torch; a user's are."""
    names, classes = {}, {}
    for kind in ("stager", "caller", "writer"):
        plain = getattr(settings, kind)
        option = part_option(kind, str(plain["_target_"]))
        if option is None:
            classes[kind] = part_class(kind, plain, object)
        names[kind] = option or classes[kind].__name__
    return PartFacts(
        **names,
        takes_snapshot=getattr(classes.get("stager"), "takes_snapshot", names["stager"] != "none"),
        in_other_process=getattr(classes.get("caller"), "in_other_process", names["caller"] != "inline"),
        single_file=bool(getattr(classes.get("writer"), "single_file", "")),
    )


def processes(settings: Checkpoint, parts: PartFacts) -> Iterator[str]:
    """Processes and threads of a rank, besides the training thread."""
    writes = f"{settings.writer.get('workers', 1)} threads write, each with one that computes checksums"
    caller = settings.caller
    if parts.caller in ("persistent", "temporal"):
        life = "as long as the run" if parts.caller == "persistent" else "started for each save"
        priority = f"nice {caller['nice']}, I/O priority {caller['io_priority']}"
        yield f"writer process, {life}, {priority}: {writes}"
        if settings.recovery.mode is not RecoveryMode.none:
            yield f"if the run fails, its writer process keeps the newest snapshot for {settings.recovery.lease:g} s"
        if settings.recovery.mode is RecoveryMode.peers:
            yield "thread ckpt-peers: has the writer process send snapshots to those of other hosts"
    elif parts.in_other_process:
        yield f"what {parts.caller} starts: {writes}"
    else:
        yield f"no other process; in a save, {writes}"
    yield "thread ckpt-save: has each save written, votes with the other ranks, commits"
    if parts.stager == "zero_overhead":
        yield "thread ckpt-stage: copies beside forward and backward"
    if settings.events:
        yield "thread ckpt-events: records saves and loads"
    if settings.listeners:
        yield "a thread ckpt-listener for each of checkpoint.listeners"
    if settings.export.format.value != "none":
        when = f"every {settings.export.every_steps} steps and " if settings.export.every_steps else ""
        yield f"on rank 0, {when}at the end: a process that exports to {settings.export.format.value}, at low priority"
    if (publish := settings.publish).to is not None:
        when = "after each commit" if publish.every == 1 else f"after one of {publish.every} commits"
        what = "weights" if publish.delta is DeltaMode.off else "changes of weights"
        yield f"on rank 0, {when}: a process that publishes {what} to {publish.to}, at low priority"
    yield "with several ranks, thread ckpt-heartbeat: shows the others that this rank is alive"
    yield "with several ranks, threads ckpt-store: one per connection, make the calls to the store of the ranks"


def waits(settings: Checkpoint, parts: PartFacts) -> Iterator[str]:
    """What the training thread waits for."""
    save = settings.save
    every = [f"every {save.every_steps} steps"] if save.every_steps else []
    every += [f"every {save.every_seconds:g} s"] if save.every_seconds else []
    every += ["at the end"] if save.at_end else []
    every += [f"every {memory} steps to memory alone"] if (memory := settings.recovery.every_steps) else []
    yield f"saves {' and '.join(every)}; other steps wait for nothing" if every else "nothing is saved by itself"
    if not parts.in_other_process:
        copy = "the copy, " if parts.takes_snapshot else ""
        yield f"a save waits for all of it: {copy}the write, the commit"
        return
    if parts.stager == "zero_overhead":
        yield "a save waits for a copy of what forward may change, such as BatchNorm's buffers"
        yield "then optimizer.step() waits for the rest of the copy: guard(optimizer) if it is not in the state"
    elif parts.takes_snapshot:
        yield "a save waits for one copy of the state into host memory"
    overlap, arenas = settings.overlap.value, settings.stager.get("arenas", 1)
    busy = f"{arenas} earlier save{'s are' if arenas > 1 else ' is'} still being written"
    done = {"wait": "it also waits until one has been written", "skip": "it is skipped", "error": "it raises an error"}
    yield f"while {busy}, {done[overlap]} (checkpoint.overlap={overlap})"
    limit = deadlines(settings)["stage"] if settings.max_stall_s is None else settings.max_stall_s
    key = "timeouts.stage" if settings.max_stall_s is None else "max_stall_s"
    yield f"at most {limit:g} s (checkpoint.{key}); the ranks agree by small messages, without collectives"


def explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "words", nargs="*", metavar="PRESET | OVERRIDE", help=f"a preset ({USUAL}), and overrides as for Hydra"
    )


def run_explain(parsed: argparse.Namespace, output: Output) -> None:
    """`ckpt explain [PRESET] [OVERRIDES...]`: what the factory would build, and where each choice comes from.

    Show what a config builds, without building it: parts and where each choice comes from, processes and threads, and
    what training waits for. Takes a second: Hydra composes.

    examples:
      ckpt explain async_zero_overhead checkpoint.writer.workers=4
      ckpt explain +recipe=safest checkpoint/stager=pinned
      ckpt explain mine 'hydra.searchpath=[file://conf]'   # your mine.yaml
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
