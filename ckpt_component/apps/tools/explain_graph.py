"""What the factory would build from a config, in words: choices that it makes itself, processes, memory, waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from ...config.following import deadlines, longest_pause
from ...config.parts import part_class
from ...config.rules import PartFacts
from ...config.schema import Checkpoint, part_option
from ...options import Commit
from ...storage.checksum import ChecksumMissingError, find_checksum
from ...storage.fs import FsOps
from ...storage.space import amount
from ..planning.plan import WRITER_BYTES


@dataclass(frozen=True)
class Automatic:
    """A value that is not in the config but follows from it or from the machine."""

    key: str
    value: str
    why: str


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


def automatic(settings: Checkpoint, parts: PartFacts, folder: str) -> Iterator[Automatic]:
    """What is decided without a key, or where a key leaves it open.

    Args:
        settings: the config.
        parts: the parts.
        folder: absolute path of the checkpoints.
    """
    awaited = "caller writes in another process" if parts.in_other_process else "caller writes in the training process"
    yield Automatic("checkpointer", "AsyncCheckpointer" if parts.in_other_process else "SyncCheckpointer", awaited)
    if parts.takes_snapshot:
        memory = "memfd" if parts.in_other_process else "private memory"
        yield Automatic("snapshot in", memory, awaited)
    writer, times = settings.writer, settings.timeouts
    if writer.get("io") == "auto":
        yield _io(settings, folder)
    if "checksum" in writer:
        name = writer["checksum"]
        try:
            chosen = find_checksum(None if name == "auto" else name)
            why = "the fastest installed" if name == "auto" else "its fastest installed package"
            yield Automatic("checkpoint.writer.checksum", f"{chosen.name} by {chosen.package}", why)
        except ChecksumMissingError as error:
            yield Automatic("checkpoint.writer.checksum", name, str(error))
    for name, seconds in deadlines(settings).items():
        if getattr(times, name) is None:
            yield Automatic(f"checkpoint.timeouts.{name}", f"{seconds:g} s", "null follows the other timeouts")
    if settings.on_error.value == "retry" and settings.retry.max_backoff_seconds is None:
        pause = longest_pause(settings.retry)
        yield Automatic("checkpoint.retry.max_backoff_seconds", f"{pause:g} s", "null: 60, or backoff_seconds")


def _io(settings: Checkpoint, folder: str) -> Automatic:
    key = "checkpoint.writer.io"
    if settings.commit is Commit.manifest:
        return Automatic(key, "buffered", "commit=manifest: a file cannot be opened twice")
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    if FsOps().in_memory(folder):
        return Automatic(key, "buffered", f"{folder} is in memory")
    return Automatic(key, "by a trial", "at the first save of 32 MiB or more; ckpt doctor makes it now")


def processes(settings: Checkpoint, parts: PartFacts) -> Iterator[str]:
    """Processes and threads of a rank, besides the training thread."""
    workers = settings.writer.get("workers", 1)
    writes = f"{workers} threads write, each with one that computes checksums"
    if parts.caller == "persistent":
        yield f"writer process, as long as the run, {_priority(settings)}: {writes}"
    elif parts.caller == "temporal":
        yield f"writer process, started for each save, {_priority(settings)}: {writes}"
    elif parts.in_other_process:
        yield f"what {parts.caller} starts: {writes}"
    else:
        yield f"no other process; in a save, {writes}"
    yield "thread ckpt-save: has each save written, votes with the other ranks, commits"
    if parts.stager == "zero_overhead":
        yield "thread ckpt-stage: copies beside forward and backward"
    elif parts.takes_snapshot:
        yield "during the copy: as many threads as torch uses"
    if settings.events:
        yield "thread ckpt-events: records saves and loads, and tells listeners"
    if settings.export.format.value != "none":
        when = f"every {settings.export.every_steps} steps and " if settings.export.every_steps else ""
        yield f"on rank 0, {when}at the end: a process that exports to {settings.export.format.value}, at low priority"
    yield "with several ranks, thread ckpt-heartbeat: shows the others that this rank is alive"


def _priority(settings: Checkpoint) -> str:
    caller = settings.caller
    return f"nice {caller['nice']}, I/O priority {caller['io_priority']}"


def host_memory(settings: Checkpoint, parts: PartFacts, state: float | None) -> Iterator[str]:
    """Host memory of a rank; `state` is the bytes of its state, if known."""
    arenas = settings.stager.get("arenas", 1 if parts.takes_snapshot else 0)
    if arenas:
        total = "" if state is None else f" = {amount(round(arenas * state))}"
        when = "" if arenas == 1 else "; the second when saves follow closely" if arenas == 2 else ", as saves overlap"
        yield f"{arenas} arena{'s' if arenas > 1 else ''} x the rank's state{total}{when}"
    else:
        blocks = 2 * settings.writer.get("workers", 1) * settings.writer.get("block_bytes", 0)
        yield f"no snapshot; blocks of {amount(blocks)} while a save writes"
    if settings.stager.get("device_buffer_bytes"):
        yield f"and up to {amount(settings.stager['device_buffer_bytes'])} on each CUDA device"
    if parts.in_other_process:
        yield f"writer process: {amount(round(WRITER_BYTES))}, and the arenas, which it shares"


def waits(settings: Checkpoint, parts: PartFacts) -> Iterator[str]:
    """What the training thread waits for."""
    save = settings.save
    every = [f"every {save.every_steps} steps"] if save.every_steps else []
    every += [f"every {save.every_seconds:g} s"] if save.every_seconds else []
    every += ["at the end"] if save.at_end else []
    yield f"saves {' and '.join(every)}; other steps wait for nothing" if every else "nothing is saved by itself"
    if not parts.in_other_process:
        copy = "the copy, " if parts.takes_snapshot else ""
        yield f"a save waits for all of it: {copy}the write{_synced(settings)}, the commit"
        return
    if parts.stager == "zero_overhead":
        yield "a save waits for a copy of what forward may change, such as BatchNorm's buffers"
        yield "then optimizer.step() waits for the rest of the copy: call guard(optimizer)"
    elif parts.takes_snapshot:
        yield "a save waits for one copy of the state into host memory"
    overlap, arenas = settings.overlap.value, settings.stager.get("arenas", 1)
    busy = f"{arenas} earlier save{'s are' if arenas > 1 else ' is'} still being written"
    done = {"wait": "it also waits until one has been written", "skip": "it is skipped", "error": "it raises an error"}
    yield f"while {busy}, {done[overlap]} (checkpoint.overlap={overlap})"
    limit = deadlines(settings)["stage"] if settings.max_stall_s is None else settings.max_stall_s
    key = "timeouts.stage" if settings.max_stall_s is None else "max_stall_s"
    yield f"at most {limit:g} s (checkpoint.{key}); the ranks agree by small messages, without collectives"


def _synced(settings: Checkpoint) -> str:
    return " and sync" if settings.durability.value == "power_cut" else ""
