"""Every key of a checkpoint config: its type, default and range, and one line on what it does.

This is the only place with defaults; files in `conf/` set only what differs. The schema of a part has the name of the
part's class and the keys of its constructor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.options import (
    ARENAS,
    BLOCK_BYTES,
    BYTES_PER_SECOND,
    NICE,
    WORKERS,
    ChecksumName,
    Commit,
    DeltaMode,
    Durability,
    ExportFormat,
    FrozenMode,
    IoMode,
    IoPriority,
    MetricMode,
    Naming,
    OnDifferentReplicas,
    OnError,
    OnLag,
    Overlap,
    PageCache,
    Prove,
    ReadMode,
    RecoveryMode,
    ReplicaCheck,
    ReuseMode,
    Verify,
)
from .quantities import BYTES, SECONDS, above, at_least, within

#: `omegaconf.MISSING`, without importing OmegaConf: `ckpt` reads the schema in a command that must start fast.
MISSING: Any = "???"


def target(name: str) -> str:
    """The field for the class of a part, which is not an argument."""
    return field(default=name, init=False)


@dataclass
class Save:
    """When to save. A save is due when either of the two intervals has passed."""

    every_steps: int | None = at_least(1, 100)
    """Save every n-th step; null: not by steps."""
    every_seconds: float | None = above(0, None, SECONDS)
    """Save when this many seconds have passed since the last save began; null: not by time."""
    at_end: bool = True
    """Also save the last step, when the manager's `with` block ends without an exception."""
    frozen: FrozenMode = FrozenMode.keep
    """Parameters that need no gradient: `keep` stores them; `skip` stores digests, which the next run must match."""


@dataclass
class Best:
    """Which checkpoints are the best, by a metric that is passed to `save` or `maybe_save`."""

    metric: str | None = None
    """Also keep the checkpoints with the best value of this metric; null: they are not compared."""
    mode: MetricMode = MetricMode.min
    """Whether the smallest value is the best (`min`) or the largest (`max`)."""
    last: int = at_least(1, 1)
    """Keep this many of the best."""


@dataclass
class Keep:
    """Which checkpoints to keep. Only committed ones count, and the last good one is never deleted."""

    last: int | None = at_least(1, 3)
    """Keep this many of the newest checkpoints; null: all of them."""
    every_steps: int | None = at_least(1, None)
    """Also keep the checkpoint of every n-th step permanently; null: none."""
    best: Best = field(default_factory=Best)
    """Also keep the best ones by a metric."""


@dataclass
class Reuse:
    """Bytes that did not change are not written again: checkpoints share the files of frozen weights."""

    mode: ReuseMode = ReuseMode.auto
    """`auto`: share files with the last checkpoint where their bytes are proved to be the same; `off`: write all."""
    frozen: list[str] = field(default_factory=list)
    """Keys of tensors that will not change, such as [model.base.*]; reused from the second save on."""
    base: str | None = field(default=None, metadata={"path": True})
    """A run's folder, or a checkpoint, on the same file system, whose files may be shared too."""


@dataclass
class Local:
    """A fast folder that checkpoints are saved to first. They are uploaded to `checkpoint.dir` in the background."""

    dir: str | None = field(default=None, metadata={"path": True})
    """A fast folder to save to, one for all ranks or one on each host; null: save to `checkpoint.dir` itself."""
    keep_last: int = at_least(1, 2)
    """Keep this many of the newest, and those of `keep.best`, in `local.dir`. In `checkpoint.dir`, `keep` applies."""


@dataclass
class Upload:
    """How checkpoints get from `checkpoint.local.dir` to `checkpoint.dir`: by a process of low priority on rank 0."""

    every_steps: int | None = at_least(1, None)
    """Upload every n-th step and the last one of the run; null: all, but only the newest if uploads lag."""
    max_bytes_per_second: float | None = within(BYTES_PER_SECOND, None, BYTES)
    """The most that a host uploads per second; null: no limit."""
    finish_seconds: float = above(0, 300.0, SECONDS)
    """How long uploads continue after the run has ended in any way; the next run does the rest."""
    max_lag_steps: int | None = at_least(1, None)
    """How many steps `checkpoint.dir` may be behind before `on_lag` applies; null: any number."""
    on_lag: OnLag = OnLag.warn
    """When uploads are too far behind: `warn`, or fail the next save with an `error`."""


@dataclass
class Recovery:
    """What the next run finds in memory after this one has died; see [memory](memory.md)."""

    mode: RecoveryMode = RecoveryMode.none
    """The newest snapshot stays in memory for the next run: on this `host`; on its `peers` too; or `none`."""
    every_steps: int | None = at_least(1, None)
    """Also take a snapshot every n-th step for memory alone; null: only what `save` writes stays in memory."""
    lease: float = above(0, 600.0, SECONDS)
    """How long the snapshot stays after its run has died, while no newer run uses it."""
    replicas: int = at_least(1, 1)
    """With `peers`: on how many other hosts a copy of each rank's snapshot stays."""
    peers: Any = None
    """With `peers`: which host has copies for which, such as {node1: node4}; null: the one half the hosts away."""
    max_bytes_per_second: float | None = within(BYTES_PER_SECOND, None, BYTES)
    """With `peers`: the most that each rank sends per second, to all its peers together; null: no limit."""


@dataclass
class Retry:
    """How `on_error: retry` repeats a failed save: all ranks together write all files of the same snapshot again."""

    attempts: int = at_least(2, 3)
    """Attempts per save, including the first."""
    backoff_seconds: float = above(0, 1.0, SECONDS)
    """Pause before the second attempt; it doubles before each further one."""
    max_backoff_seconds: float | None = above(0, None, SECONDS)
    """The longest pause; null: 60, or `backoff_seconds` if that is longer."""


@dataclass
class Timeouts:
    """Deadlines, in seconds or as `30m`. A wait that exceeds one raises an error that names its key."""

    worker_start: float = above(0, 30.0, SECONDS)
    """For a writer process to start."""
    stage: float | None = above(0, None, SECONDS)
    """For a snapshot's memory to be free and, separately, for copying; null: 300, or `max_stall_s` if that is more."""
    write: float | None = above(0, None, SECONDS)
    """For all files of a checkpoint to be written and committed; null: 1800, or more if `stall` is long."""
    close: float = above(0, 60.0, SECONDS)
    """For an idle writer process to exit."""
    heartbeat: float | None = above(0, None, SECONDS)
    """A rank without a heartbeat for this long is considered dead; null: 30, or less if `stall` is short."""
    stall: float | None = above(0, None, SECONDS)
    """A rank that writes nothing for this long is considered hung; null: 300, or less if `write` is short."""
    visible: float = above(0, 60.0, SECONDS)
    """For all ranks to see a file or folder that another created, on network file systems that cache names."""


@dataclass
class Load:
    """How to load. Other names are for a checkpoint that `resume` names by step or path; the newest loads as it is."""

    # A dict in the type would keep Hydra's command line from adding keys.
    rename: Any = None
    """Maps the checkpoint's names to the state's, such as {transformer.h: model.blocks}; `*` stands for any text."""
    prefix: str | None = None
    """Prefix of all keys, added after the renames: `model` loads a plain state dict into the state's `model`."""
    ignore: list[str] = field(default_factory=list)
    """Names not to load, such as [lm_head]: the checkpoint's keys, or the state's if none of them matches."""
    prove: Prove = Prove.on_resume
    """When to compare what objects give back with what they were given: `on_read`, `on_resume`, or `off`."""
    may_differ: list[str] = field(default_factory=list)
    """Keys whose values may differ then, such as [sampler.position]; `*` stands for any text."""
    device: str | None = None
    """Where a model on the meta device gets memory, as cuda; null: the default device, or that of DTensors' mesh."""


@dataclass
class Export:
    """Write committed checkpoints also as files for other programs, as `ckpt export` does, in a background process."""

    format: ExportFormat = ExportFormat.none
    """`hf`: a folder for `from_pretrained`; `safetensors` or `torch`: one file; `none`: no exports."""
    dir: str | None = field(default=None, metadata={"path": True})
    """Folder of the exports, which are named as their checkpoints; null: `exports` in `checkpoint.dir`."""
    every_steps: int | None = at_least(1, None)
    """Also export the checkpoint of every n-th step; null: only the last one of a run that comes to its end."""
    prefix: str | None = None
    """Export only keys below this prefix, which is stripped; null: with `hf` the model, otherwise everything."""
    rename: Any = None
    """Maps the checkpoint's names to the export's, such as {blocks: transformer.h}, after the prefix is stripped."""
    ignore: list[str] = field(default_factory=list)
    """Names in the checkpoint that are left out, after the prefix is stripped; `*` stands for any text."""
    dtype: str | None = None
    """Convert floating-point tensors: `float64`, `float32`, `float16`, `bfloat16`; null: as they are."""
    config_from: str | None = field(default=None, metadata={"path": True})
    """Hugging Face folder whose config.json and tokenizer files are copied into each `hf` export."""
    timeout: float = above(0, 3600.0, SECONDS)
    """For one export to finish, in the background or at the end of the run."""


@dataclass
class Publish:
    """Publish the weights of committed checkpoints for inference, as versions of which most hold only what changed."""

    to: str | None = field(default=None, metadata={"path": True})
    """Folder or bucket of the versions, from which `ckpt pull` and `follow` take them; null: nothing is published."""
    every: int = at_least(1, 1)
    """Publish each n-th checkpoint, snapshots in memory (`recovery.every_steps`) included; 1: as many as it can."""
    delta: DeltaMode = DeltaMode.auto
    """What a version has of the one before: `auto`: xor; `overwrite`: positions and bytes; `off`: all is whole."""
    whole_every: int = at_least(1, 20)
    """Publish a whole version after this many deltas in a row."""
    keep: int = at_least(1, 10)
    """Keep this many of the newest versions, and those that they are based on."""
    prefix: str | None = None
    """Publish only keys below this prefix, which is stripped; null: the model."""
    rename: Any = None
    """Maps the checkpoint's names to the published ones, as in `export.rename`."""
    ignore: list[str] = field(default_factory=list)
    """Names in the checkpoint that are left out, as in `export.ignore`."""
    dtype: str | None = None
    """Convert floating-point tensors: `float64`, `float32`, `float16`, `bfloat16`; null: as they are."""
    config_from: str | None = field(default=None, metadata={"path": True})
    """Hugging Face folder whose config.json and tokenizer files are in each whole version."""
    mirror: str | None = field(default=None, metadata={"path": True})
    """Local folder for a copy of the newest weights; null: `.ckpt-mirror` in `local.dir`, or in `dir`."""
    timeout: float = above(0, 3600.0, SECONDS)
    """For one version, in the background or at the end of the run."""


@dataclass
class BucketStorage:
    """How a bucket is reached."""

    # A dict in the type would keep Hydra's command line from adding keys.
    options: Any = None
    """Options of obstore, such as {endpoint: ..., region: ...}; what is not set comes from the environment."""


@dataclass
class Checkpoint:
    """The config below `checkpoint`."""

    _target_: str = target("ckpt_component.instantiate_manager")
    """What `hydra.utils.instantiate` calls."""
    _recursive_: bool = field(default=False, init=False)
    """False: the manager builds its parts itself."""
    dir: str = field(default="checkpoints", metadata={"path": True})
    """Folder of the checkpoints; or a bucket and a prefix: `s3://`, `gs://`, `az://`; see [storage](storage.md)."""
    storage: BucketStorage = field(default_factory=BucketStorage)
    """How a bucket is reached."""
    enabled: bool = True
    """False: save and restore nothing."""
    naming: Naming = Naming.megatron
    """`megatron`: iter_0000200; `step`: step_00000200; `huggingface`: checkpoint-200; `torchtitan`: step-200."""
    save: Save = field(default_factory=Save)
    """When to save."""
    keep: Keep = field(default_factory=Keep)
    """Which checkpoints to keep."""
    reuse: Reuse = field(default_factory=Reuse)
    """Bytes that did not change are not written again."""
    local: Local = field(default_factory=Local)
    """A fast folder that checkpoints are saved to first."""
    upload: Upload = field(default_factory=Upload)
    """How checkpoints get from `checkpoint.local.dir` to `checkpoint.dir`."""
    export: Export = field(default_factory=Export)
    """Write committed checkpoints also as files for other programs."""
    publish: Publish = field(default_factory=Publish)
    """Publish the weights of committed checkpoints for inference; see [publishing](publish.md)."""
    recovery: Recovery = field(default_factory=Recovery)
    """What the next run finds in memory after this one has died."""
    resume: int | str = "auto"
    """`auto`: from the newest good checkpoint, if any; `must`: fail without one; `never`; `best`; a step; or a path."""
    load: Load = field(default_factory=Load)
    """How to load a checkpoint, and what is proven then."""
    rewind: bool = False
    """Let `resume` be a step, a path, `best` or `never` where later checkpoints exist, and set those aside."""
    takeover: bool = False
    """Save even in a folder in which another run of this host still saves; that run's next save then fails."""
    overlap: Overlap = Overlap.wait
    """When a save is due while the previous one still runs: `wait` for it, `skip` the new one, or `error`."""
    on_error: OnError = OnError["raise"]
    """When a save fails: `raise` at the next call; `warn` in log and reports, then continue; or `retry`, then raise."""
    retry: Retry = field(default_factory=Retry)
    """How `on_error: retry` repeats a failed save."""
    give_up_after: int | None = at_least(1, 3)
    """With `warn` and `retry`: raise after this many failed saves in a row; null: never."""
    max_stall_s: float | None = above(0, None, SECONDS)
    """The longest that a save may block training before it is given up; null: limited by `timeouts` only."""
    min_free_bytes: int | None = at_least(0, 0, BYTES)
    """Bytes that must remain free on the disk after a save; null: do not check free space in advance."""
    durability: Durability = Durability.power_cut
    """What a committed checkpoint survives: `power_cut`, or only `process_crash`, which is faster."""
    commit: Commit = Commit.rename
    """How a checkpoint is committed: by `rename` of its folder, or by a `manifest` written last (mounted buckets)."""
    verify: Verify = Verify.on_read
    """When to verify checksums: `on_read`, at every load; `on_resume`, when the manager resumes; or `off`."""
    read_once: ReadMode = ReadMode.auto
    """`auto`: on several hosts, one rank reads what several want, and serves it to them; or `off`."""
    check_replicas: ReplicaCheck = ReplicaCheck.sample
    """Compare replicas: a `sample` at some saves; `all` bytes at every save, for which training waits; or `off`."""
    on_different_replicas: OnDifferentReplicas = OnDifferentReplicas.warn
    """When replicas differ: `warn`, or fail the save with an `error`."""
    events: bool = True
    """Record every save and load in `events/` in `dir`, one JSON object per line; see [events](events.md)."""
    listeners: list[Any] = field(default_factory=list)
    """Listeners of saves and loads: `[tensorboard, wandb, mlflow, opentelemetry]`, or dicts with your `_target_`."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """Deadlines in seconds."""
    stager: Any = MISSING
    """What takes the snapshot: checkpoint/stager=none, pinned, shared_memory, zero_overhead, or your own."""
    caller: Any = MISSING
    """Which process writes: checkpoint/caller=inline, temporal, persistent, or your own."""
    writer: Any = MISSING
    """The format: checkpoint/writer=dcp, torch_save, safetensors, or your own."""


@dataclass
class Part:
    """Keys of every part."""

    _target_: str = MISSING
    """The class to build, by its full name."""


@dataclass
class LiveStager(Part):
    """`checkpoint/stager=none`."""

    _target_: str = target("ckpt_component.stagers.LiveStager")


@dataclass
class PinnedStager(Part):
    """`checkpoint/stager=pinned`."""

    _target_: str = target("ckpt_component.stagers.PinnedStager")
    arenas: int = within(ARENAS, 1)
    """How many saves may be in flight, each with its own copy of the state in host memory."""


@dataclass
class SharedMemoryStager(Part):
    """`checkpoint/stager=shared_memory`."""

    _target_: str = target("ckpt_component.stagers.SharedMemoryStager")
    arenas: int = within(ARENAS, 1)
    """How many saves may be in flight, each with its own copy of the state in host memory."""


@dataclass
class ZeroOverheadStager(Part):
    """`checkpoint/stager=zero_overhead`."""

    _target_: str = target("ckpt_component.stagers.ZeroOverheadStager")
    arenas: int = within(ARENAS, 2)
    """How many saves may be in flight, each with its own copy of the state in host memory."""


@dataclass
class InlineCaller(Part):
    """`checkpoint/caller=inline`."""

    _target_: str = target("ckpt_component.callers.InlineCaller")


@dataclass
class TemporalCaller(Part):
    """`checkpoint/caller=temporal`."""

    _target_: str = target("ckpt_component.callers.TemporalCaller")
    nice: int = within(NICE, 10)
    """How much the writer process yields the CPU to training: 0 not at all, 19 most."""
    io_priority: IoPriority = IoPriority.low
    """How the writer process queues for the disk: `normal`, `low`, or `idle` (when no other process uses it)."""


@dataclass
class PersistentCaller(Part):
    """`checkpoint/caller=persistent`."""

    _target_: str = target("ckpt_component.callers.PersistentCaller")
    nice: int = within(NICE, 10)
    """How much the writer process yields the CPU to training: 0 not at all, 19 most."""
    io_priority: IoPriority = IoPriority.low
    """How the writer process queues for the disk: `normal`, `low`, or `idle` (when no other process uses it)."""
    page_cache: PageCache = PageCache.auto
    """`auto`: where memory is plentiful, read the newest checkpoint into the page cache after its commit; or `off`."""


@dataclass
class WriterPart(Part):
    """Keys of every writer."""

    workers: int = within(WORKERS, 2)
    """Parallel writer threads per rank, each with two blocks of memory, and with `dcp` its own file."""
    block_bytes: int = within(BLOCK_BYTES, 8 << 20, BYTES)
    """Bytes per write call; each worker holds two such blocks."""
    checksum: ChecksumName = ChecksumName.crc32
    """Checksum of every item: `crc32`; `crc32c` or `xxh3_64`, with their packages; `auto`: the fastest installed."""
    io: IoMode = IoMode.auto
    """How files are written: `buffered`, `direct` (bypasses the page cache), or `auto`: decided by a trial per disk."""
    max_bytes_per_second: float | None = within(BYTES_PER_SECOND, None, BYTES)
    """The most that a rank writes per second, for storage shared with others; null: no limit."""


@dataclass
class DcpWriter(WriterPart):
    """`checkpoint/writer=dcp`."""

    _target_: str = target("ckpt_component.writers.DcpWriter")
    separation_hint: str | None = None
    """Keys with this prefix are written to separate files; null: no separate files."""


@dataclass
class TorchSaveWriter(WriterPart):
    """`checkpoint/writer=torch_save`."""

    _target_: str = target("ckpt_component.writers.TorchSaveWriter")


@dataclass
class SafetensorsWriter(WriterPart):
    """`checkpoint/writer=safetensors`."""

    _target_: str = target("ckpt_component.writers.SafetensorsWriter")


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

#: Groups `checkpoint/<name>` that build nothing -> the schema of their keys, of which `mode` is the option.
SETTINGS: Mapping[str, type] = {"recovery": Recovery}

#: Every group `checkpoint/<name>` -> its options.
GROUPS: Mapping[str, tuple[str, ...]] = {
    **{kind: tuple(options) for kind, options in PARTS.items()},
    "recovery": tuple(RecoveryMode.__members__),
}


def part_option(kind: str, target: str) -> str | None:
    """The option of `checkpoint/<kind>` with this `_target_`, or None for a user's class."""
    module, _, name = target.rpartition(".")
    if module != f"ckpt_component.{kind}s":
        return None
    return next((option for option, schema in PARTS[kind].items() if schema.__name__ == name), None)


def part_schema(kind: str, target: str) -> type[Part] | None:
    """The schema of one of our own parts, or None for a user's class."""
    option = part_option(kind, target)
    return None if option is None else PARTS[kind][option]
