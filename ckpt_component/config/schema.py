"""Every key that a checkpoint config has: its type, its default, its range, and one line on what it does.

Defaults stand here and nowhere else; the files in `conf/` set what differs. A part's schema has the name of
the class that it is for, and the keys of that class's constructor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from omegaconf import MISSING

from ..options import (
    ARENAS,
    BLOCK_BYTES,
    BYTES_PER_SECOND,
    DEVICE_BUFFER_BYTES,
    NICE,
    WORKERS,
    ChecksumName,
    Commit,
    Durability,
    IoMode,
    IoPriority,
    Naming,
    OnError,
    Overlap,
    Range,
    Verify,
)
from .quantities import BYTES, SECONDS

T = TypeVar("T")


def within(limits: Range, default: T, unit: str | None = None) -> T:
    """A field whose number is in a range, or None where its type allows it.

    Args:
        limits: the range.
        default: of the field.
        unit: BYTES or SECONDS: the number may be written with a unit, such as `8MB`.
    """
    return field(default=default, metadata={"range": limits, "unit": unit})


def at_least(limit: float, default: T, unit: str | None = None) -> T:
    """As `within`, for a number that is not below `limit`."""
    return within(Range(limit), default, unit)


def above(limit: float, default: T, unit: str | None = None) -> T:
    """As `within`, for a finite number above `limit`."""
    return within(Range.finite_above(limit), default, unit)


@dataclass
class Save:
    """When to save. A save is due when either of the two periods is over."""

    every_steps: int | None = at_least(1, 100)
    """Save at every n-th step; null: not by steps."""
    every_seconds: float | None = above(0, None, SECONDS)
    """Save when this many seconds have passed since the last save began; null: not by time."""
    at_end: bool = True
    """Save the last step too, when the manager's `with` block ends without an exception."""


@dataclass
class Keep:
    """What to keep. Only committed checkpoints count, and the last good one is never deleted."""

    last: int | None = at_least(1, 3)
    """Keep this many of the newest checkpoints; null: all of them."""
    every_steps: int | None = at_least(1, None)
    """Keep those of every n-th step permanently, besides the newest; null: none."""


@dataclass
class Retry:
    """How `on_error: retry` tries a failed save again: the same snapshot, all files anew, on all ranks together."""

    attempts: int = at_least(2, 3)
    """How often a save is tried in all."""
    backoff_seconds: float = above(0, 1.0, SECONDS)
    """Pause before the second try; before each further one it is twice as long."""
    max_backoff_seconds: float | None = above(0, None, SECONDS)
    """The longest pause; null: 60, or the first one where that is longer."""


@dataclass
class Timeouts:
    """Deadlines, in seconds or as `30m`. A wait that runs into one is an error that names its key."""

    worker_start: float = above(0, 30.0, SECONDS)
    """Until a writer process has started."""
    stage: float | None = above(0, None, SECONDS)
    """Until memory for a snapshot is free, and until its copy is done; null: 300, or `max_stall_s` if that is more."""
    write: float | None = above(0, None, SECONDS)
    """Until all files of a checkpoint are written and committed; null: 1800, or more where `stall` is long."""
    close: float = above(0, 60.0, SECONDS)
    """Until an idle writer process has ended."""
    heartbeat: float | None = above(0, None, SECONDS)
    """With several ranks: a rank without a heartbeat for so long counts as dead; null: 30, or less, below `stall`."""
    stall: float | None = above(0, None, SECONDS)
    """With several ranks: one that writes nothing for so long hangs; null: 300, less where `write` is short."""
    visible: float = above(0, 60.0, SECONDS)
    """With several ranks: until all see what one of them made, where a network file system caches names."""


@dataclass
class Checkpoint:
    """The whole of `checkpoint`."""

    dir: str = "checkpoints"
    """Folder of the checkpoints, local or mounted."""
    enabled: bool = True
    """False: nothing is saved and nothing restored."""
    naming: Naming = Naming.megatron
    """`megatron`: iter_0000200 and latest_checkpointed_iteration.txt; `step`: step_00000200 and latest."""
    save: Save = field(default_factory=Save)
    """When to save."""
    keep: Keep = field(default_factory=Keep)
    """Which checkpoints to keep."""
    resume: int | str = "auto"
    """`auto`: from the newest good one if there is one; `must`: fail without one; `never`; a step; or a path."""
    rewind: bool = False
    """With `resume` a step, a path or `never`: retire the checkpoints that follow, which is refused otherwise."""
    overlap: Overlap = Overlap.wait
    """A save comes while the one before it still runs: `wait` for it, `skip` this one, or `error`."""
    on_error: OnError = OnError["raise"]
    """A save fails: `raise` it at the next call, `warn` in log and reports and go on, or `retry` first, then raise."""
    retry: Retry = field(default_factory=Retry)
    """How `on_error: retry` tries again."""
    give_up_after: int | None = at_least(1, 3)
    """With `warn` and `retry`: so many failed saves in a row are raised in any case; null: no number is too many."""
    max_stall_s: float | None = above(0, None, SECONDS)
    """The most seconds that a save may keep training waiting; then it is given up. null: as long as `timeouts` say."""
    min_free_bytes: int | None = at_least(0, 0, BYTES)
    """What must stay free on the disk beside a new checkpoint; null: free space is not looked at beforehand."""
    durability: Durability = Durability.power_cut
    """What a committed checkpoint survives: `power_cut`, or `process_crash` alone, which is faster."""
    commit: Commit = Commit.rename
    """How a checkpoint appears: by `rename` of its folder; or `manifest`, put last, on a mounted object store."""
    verify: Verify = Verify.on_read
    """When checksums are compared: `on_read`, at every load; `on_resume`, when the manager resumes; or `off`."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """Deadlines in seconds."""
    stager: Any = MISSING
    """Who takes the snapshot: checkpoint/stager=none, pinned, shared_memory, zero_overhead, or your own."""
    caller: Any = MISSING
    """Which process writes: checkpoint/caller=inline, temporal, persistent, or your own."""
    writer: Any = MISSING
    """The format: checkpoint/writer=dcp, torch_save, safetensors, or your own."""


@dataclass
class Part:
    """What every part has."""

    _target_: str = MISSING
    """The class to build, by its full name."""


@dataclass
class LiveStager(Part):
    """`checkpoint/stager=none`."""


@dataclass
class PinnedStager(Part):
    """`checkpoint/stager=pinned`."""

    arenas: int = within(ARENAS, 1)
    """How many saves may be in flight, each with its own copy of the state in host memory."""


@dataclass
class SharedMemoryStager(Part):
    """`checkpoint/stager=shared_memory`."""

    arenas: int = within(ARENAS, 1)
    """How many saves may be in flight, each with its own copy of the state in host memory."""


@dataclass
class ZeroOverheadStager(Part):
    """`checkpoint/stager=zero_overhead`."""

    arenas: int = within(ARENAS, 2)
    """How many saves may be in flight, each with its own copy of the state in host memory."""
    device_buffer_bytes: int = within(DEVICE_BUFFER_BYTES, 0, BYTES)
    """The most memory of each CUDA device that a snapshot may take; what fits into it needs no fence. 0: none."""


@dataclass
class InlineCaller(Part):
    """`checkpoint/caller=inline`."""


@dataclass
class TemporalCaller(Part):
    """`checkpoint/caller=temporal`."""

    nice: int = within(NICE, 10)
    """How much the writer process yields the CPU to training: 0 not at all, 19 most."""
    io_priority: IoPriority = IoPriority.low
    """How the writer process queues for the disk: `normal`, `low`, or `idle` (when no other process uses it)."""


@dataclass
class PersistentCaller(Part):
    """`checkpoint/caller=persistent`."""

    nice: int = within(NICE, 10)
    """How much the writer process yields the CPU to training: 0 not at all, 19 most."""
    io_priority: IoPriority = IoPriority.low
    """How the writer process queues for the disk: `normal`, `low`, or `idle` (when no other process uses it)."""


@dataclass
class WriterPart(Part):
    """What every writer has."""

    workers: int = within(WORKERS, 2)
    """How many parallel writers a rank has, at most 128: threads with two blocks each; `dcp`: with a file each."""
    block_bytes: int = within(BLOCK_BYTES, 8 << 20, BYTES)
    """How many bytes one write call takes, at most 1 GiB: each worker holds two such blocks."""
    checksum: ChecksumName = ChecksumName.crc32
    """Checksum of every item: `crc32`; `crc32c` or `xxh3_64`, with their packages; `auto`: the fastest installed."""
    io: IoMode = IoMode.auto
    """How files are written: `buffered`, `direct` (past the page cache), or `auto`: a trial per disk says which."""
    max_bytes_per_second: float | None = within(BYTES_PER_SECOND, None, BYTES)
    """The most that a rank writes in a second, where others use the storage too; null: no limit."""


@dataclass
class DcpWriter(WriterPart):
    """`checkpoint/writer=dcp`."""

    separation_hint: str | None = None
    """Keys that start with this text go to files of their own; null: no such split."""


@dataclass
class TorchSaveWriter(WriterPart):
    """`checkpoint/writer=torch_save`."""


@dataclass
class SafetensorsWriter(WriterPart):
    """`checkpoint/writer=safetensors`."""


#: kind of part -> option of the group `checkpoint/<kind>` -> its schema.
PARTS: Mapping[str, Mapping[str, type[Part]]] = {
    "stager": {
        "none": LiveStager,
        "pinned": PinnedStager,
        "shared_memory": SharedMemoryStager,
        "zero_overhead": ZeroOverheadStager,
    },
    "caller": {"inline": InlineCaller, "temporal": TemporalCaller, "persistent": PersistentCaller},
    "writer": {"dcp": DcpWriter, "torch_save": TorchSaveWriter, "safetensors": SafetensorsWriter},
}


def part_option(kind: str, target: str) -> str | None:
    """The option of `checkpoint/<kind>` whose `_target_` this is, or None for a class of the user's."""
    module, _, name = target.rpartition(".")
    if module != f"ckpt_component.{kind}s":
        return None
    return next((option for option, schema in PARTS[kind].items() if schema.__name__ == name), None)


def part_schema(kind: str, target: str) -> type[Part] | None:
    """The schema of one of our own parts, or None for a class of the user's."""
    option = part_option(kind, target)
    return None if option is None else PARTS[kind][option]
