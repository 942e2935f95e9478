"""What the factory would build from a config, in words: processes and waits."""

from __future__ import annotations

from collections.abc import Iterator

from ..config.hydra.parts import part_class
from ..config.rules import PartFacts, deadlines
from ..config.schema import Checkpoint, part_option
from ..core.options import DeltaMode, RecoveryMode


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
