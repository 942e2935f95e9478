"""Which parts of a config fit together, and what a machine must have: one table for the factory and for `ckpt`.

Imports neither torch nor the parts: what a rule asks of them is in `PartFacts`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ..core.options import (
    Commit,
    ExportFormat,
    FrozenMode,
    IoMode,
    OnDifferentReplicas,
    RecoveryMode,
    ReplicaCheck,
    ReuseMode,
)
from ..core.spelling import invalid_choice
from ..core.storage.locate import is_url
from ..errors import CheckpointConfigError
from .schema import Checkpoint, Recovery, Retry, part_option


@dataclass(frozen=True)
class ImageCount:
    """The most images that a rank has in host memory.

    Attributes:
        staying: those that recovery keeps: the newest; with peers also the last one there, and one that is being sent
        in_flight: those that are being staged or written
        copies: images of ranks on other hosts
    """

    staying: int
    in_flight: int
    copies: int = 0

    @classmethod
    def of(cls, recovery: Recovery, arenas: int, hosts: int) -> ImageCount:
        """Those of a config.

        Args:
            recovery: `checkpoint.recovery`
            arenas: of the stager; 0: it takes no images
            hosts: how many hosts the job has
        """
        if recovery.mode is RecoveryMode.none:
            return cls(0, arenas)
        # A snapshot for memory alone need not wait for one that is still being written.
        in_flight = max(arenas, 1 if recovery.every_steps is None else 2)
        if recovery.mode is RecoveryMode.host or hosts == 1:
            return cls(1, in_flight)
        # Each rank has one that is there and one that is coming, of as many ranks as have copies of its own.
        return cls(3, in_flight, 2 * min(recovery.replicas, hosts - 1))

    @property
    def own(self) -> int:
        """Images of the rank itself."""
        return self.staying + self.in_flight


RESUME_WORDS = ("auto", "must", "never", "best")


@dataclass(frozen=True)
class PartFacts:
    """What the rules ask of the chosen parts.

    Attributes:
        stager: the stager's option, or the name of a user's class
        caller: the same of the caller
        writer: the same of the writer
        takes_snapshot: whether the stager copies the state, so that training may continue
        in_other_process: whether the caller writes in another process
        single_file: whether the writer writes one file and no folder
    """

    stager: str
    caller: str
    writer: str
    takes_snapshot: bool
    in_other_process: bool
    single_file: bool


@dataclass(frozen=True)
class Rule:
    """A refused combination, and what to type instead. Text may have the parts' names, and keys: `{settings.dir}`."""

    refuses: Callable[[Checkpoint, PartFacts], bool]
    text: str


#: Parts that do not fit together, and requirements on the machine. All other combinations work.
RULES = (
    Rule(
        lambda settings, parts: not parts.takes_snapshot and parts.in_other_process,
        "checkpoint/stager={stager} has the writer read the live tensors, which training would change while "
        "checkpoint/caller={caller} writes. Use checkpoint/caller=inline, or checkpoint/stager=shared_memory.",
    ),
    Rule(
        lambda settings, parts: parts.in_other_process and not hasattr(os, "memfd_create"),
        "checkpoint/caller={caller} passes memory to a process by memfd, which this Python lacks. "
        "Use checkpoint/caller=inline.",
    ),
    Rule(
        lambda settings, parts: settings.max_stall_s is not None and not parts.in_other_process,
        "checkpoint.max_stall_s={settings.max_stall_s} bounds how long a save in the background holds up training, "
        "and with checkpoint/caller={caller} training waits for the whole write. Use checkpoint=async_persistent, or "
        "checkpoint.max_stall_s=null.",
    ),
    Rule(
        lambda settings, parts: parts.in_other_process and settings.dir.startswith("memory://"),
        "checkpoint.dir={settings.dir} is in the memory of this process, and checkpoint/caller={caller} writes in "
        "another one. Use checkpoint/caller=inline, or another folder.",
    ),
    Rule(
        lambda settings, parts: parts.single_file and resolved_commit(settings) is Commit.manifest,
        "checkpoint/writer={writer} commits its file by a rename, and checkpoint.commit=manifest is for storage "
        "without renames. Use checkpoint.commit=rename, on another disk.",
    ),
    Rule(
        lambda settings, parts: (
            settings.writer.get("io") == IoMode.direct.value and resolved_commit(settings) is Commit.manifest
        ),
        "checkpoint.writer.io=direct opens every file twice, and checkpoint.commit=manifest is for object stores, "
        "where a file exists only once it is closed. Use checkpoint.writer.io=auto, or checkpoint.commit=rename.",
    ),
    Rule(
        lambda settings, parts: _fails_on_replicas(settings) and settings.check_replicas is ReplicaCheck.off,
        "checkpoint.on_different_replicas=error needs a comparison, and checkpoint.check_replicas=off makes none. Use "
        "checkpoint.check_replicas=sample or all, or checkpoint.on_different_replicas=warn.",
    ),
    Rule(
        lambda settings, parts: (
            _writer_of(settings) in ("torch_save", "safetensors")
            and (_fails_on_replicas(settings) or settings.check_replicas is ReplicaCheck.all)
        ),
        "checkpoint.check_replicas=all and checkpoint.on_different_replicas=error compare what is stored once for "
        "several ranks, and this writer stores the values of every rank. Use checkpoint/writer=dcp, or "
        "checkpoint.check_replicas=sample and checkpoint.on_different_replicas=warn.",
    ),
    Rule(
        lambda settings, parts: _says_what_to_reuse(settings) and settings.reuse.mode is ReuseMode.off,
        "checkpoint.reuse.frozen and checkpoint.reuse.base say which files to share, and checkpoint.reuse.mode=off "
        "shares none. Use checkpoint.reuse.mode=auto, or leave them out.",
    ),
    Rule(
        lambda settings, parts: _says_what_to_reuse(settings) and _writer_of(settings) in ("torch_save", "safetensors"),
        "checkpoint.reuse.frozen and checkpoint.reuse.base say which files to share, and this writer puts all tensors "
        "into one file. Use checkpoint/writer=dcp, or leave them out.",
    ),
    Rule(
        lambda settings, parts: settings.save.frozen is FrozenMode.skip and _writer_of(settings) == "safetensors",
        "checkpoint.save.frozen=skip stores digests of frozen parameters beside the tensors, and files of safetensors "
        "have tensors only. Use checkpoint/writer=dcp, or checkpoint.save.frozen=keep.",
    ),
    Rule(
        lambda settings, parts: settings.save.frozen is FrozenMode.skip and settings.export.format is ExportFormat.hf,
        "checkpoint.export.format=hf is for whole models, and checkpoint.save.frozen=skip stores no frozen parameters. "
        "Use checkpoint.export.format=safetensors for the others, or checkpoint.save.frozen=keep.",
    ),
    Rule(
        # A user's class may derive from PersistentCaller; the factory asks it.
        lambda settings, parts: _keeps_memory(settings) and (parts.caller == "temporal" or not parts.in_other_process),
        "checkpoint/recovery={settings.recovery.mode} keeps the newest snapshot in a writer process that outlives "
        "training, and checkpoint/caller={caller} has none. Use checkpoint=async_persistent, or "
        "checkpoint/recovery=none.",
    ),
    Rule(
        lambda settings, parts: _keeps_memory(settings) and parts.single_file,
        "checkpoint/recovery={settings.recovery.mode} keeps snapshots as checkpoints of several files, and "
        "checkpoint/writer={writer} writes one file alone. Use checkpoint/writer=dcp, or checkpoint/recovery=none.",
    ),
    Rule(
        lambda settings, parts: not _keeps_memory(settings) and settings.recovery.every_steps is not None,
        "checkpoint.recovery.every_steps={settings.recovery.every_steps} is how often a snapshot goes to memory, and "
        "checkpoint/recovery=none keeps none there. Use checkpoint/recovery=host, or "
        "checkpoint.recovery.every_steps=null.",
    ),
    Rule(
        lambda settings, parts: not _keeps_memory(settings) and settings.recovery.lease != Recovery.lease,
        "checkpoint.recovery.lease={settings.recovery.lease:g} is how long a snapshot stays in memory, and "
        "checkpoint/recovery=none keeps none there. Use checkpoint/recovery=host, or leave it out.",
    ),
    Rule(
        lambda settings, parts: settings.recovery.mode is not RecoveryMode.peers and _says_who_has_copies(settings),
        "checkpoint.recovery.replicas, peers and max_bytes_per_second say how copies of snapshots get to other hosts, "
        "and checkpoint/recovery={settings.recovery.mode} sends none. Use checkpoint/recovery=peers, or leave them "
        "out.",
    ),
)


def _keeps_memory(settings: Checkpoint) -> bool:
    return settings.recovery.mode is not RecoveryMode.none


def _says_who_has_copies(settings: Checkpoint) -> bool:
    recovery = settings.recovery
    return recovery.replicas != 1 or recovery.peers is not None or recovery.max_bytes_per_second is not None


def _fails_on_replicas(settings: Checkpoint) -> bool:
    return settings.on_different_replicas is OnDifferentReplicas.error


def _says_what_to_reuse(settings: Checkpoint) -> bool:
    return bool(settings.reuse.frozen) or settings.reuse.base is not None


def _writer_of(settings: Checkpoint) -> str | None:
    return part_option("writer", str(settings.writer["_target_"]))


def resolved_commit(settings: Checkpoint) -> Commit:
    """How saves are committed: `commit`, but in a bucket, which has no renames, by their manifest."""
    return Commit.manifest if is_url(settings.dir) and settings.local.dir is None else settings.commit


def refuse_unfit(settings: Checkpoint, parts: PartFacts) -> None:
    """Refuse parts that do not fit together, or not on this machine.

    Raises:
        CheckpointConfigError: the text says what to type instead
    """
    from .hydra.hydra_errors import HydraConfigError  # imports Hydra

    text = other_platform()
    if text:
        raise HydraConfigError(text)
    for rule in RULES:
        if rule.refuses(settings, parts):
            raise HydraConfigError(rule.text.format(**vars(parts), settings=settings))


def other_platform() -> str:
    """The text for a system other than Linux; empty on Linux."""
    if sys.platform == "linux":
        return ""
    return f"ckpt_component runs on Linux only, and this is {sys.platform}; use torch.distributed.checkpoint here."


def checked_resume(value: int | str) -> int | str:
    """Check a value of `resume`: `auto`, `must`, `never`, `best`, a step of at least 0, or a path.

    A step may be a string. A path, or URL, contains a slash, begins with `~`, or exists.
    """
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if value in RESUME_WORDS or (type(value) is int and value >= 0):
        return value
    if isinstance(value, str) and (os.sep in value or value.startswith("~") or os.path.exists(value)):
        return value
    raise CheckpointConfigError(invalid_choice("checkpoint.resume", value, RESUME_WORDS, ["a step", "a path"]))


def deadlines(config: Checkpoint) -> dict[str, float]:
    """All of `timeouts`, with numbers in place of nulls.

    The numbers keep the order `heartbeat` < `stall` < `write`: a dead rank is noticed before it is considered hung,
    and a hung rank before its write times out. `stage` is at least `max_stall_s`.
    """
    times = config.timeouts
    stage = times.stage or max(300.0, config.max_stall_s or 0.0)
    write = times.write or max(1800.0, 2 * (times.stall or 0.0), 4 * (times.heartbeat or 0.0))
    stall = times.stall or _between(times.heartbeat or 0.0, 300.0, write)
    heartbeat = times.heartbeat or _between(0.0, 30.0, stall)
    return {**vars(times), "stage": stage, "write": write, "heartbeat": heartbeat, "stall": stall}


def longest_pause(retry: Retry) -> float:
    """`retry.max_backoff_seconds`, or the number for null."""
    return retry.max_backoff_seconds or max(60.0, retry.backoff_seconds)


def _between(low: float, usual: float, high: float) -> float:
    """The usual value if it is well between the limits, else one that is."""
    if 2 * low <= high / 2:
        return min(max(usual, 2 * low), high / 2)
    return (low + high) / 2
