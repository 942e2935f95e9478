"""Options shared by the library and its configs: enums of config values, and ranges of numbers."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from ..errors import CheckpointConfigError


class Word(Enum):
    """An enum whose members are words in configs."""

    def __str__(self) -> str:
        return self.name


class Naming(Word):
    """How checkpoints are named in `checkpoint.dir`."""

    megatron = "megatron"  # iter_0000200 and latest_checkpointed_iteration.txt
    step = "step"  # step_00000200 and latest
    huggingface = "huggingface"  # checkpoint-200 and latest_checkpoint.txt
    torchtitan = "torchtitan"  # step-200 and latest_step.txt


class ReuseMode(Word):
    """Whether checkpoints share files."""

    auto = "auto"
    off = "off"


class FrozenMode(Word):
    """Whether checkpoints have the parameters that need no gradient."""

    keep = "keep"
    skip = "skip"  # digests of them alone


class Overlap(Word):
    """What happens to a save that is requested while the previous one is still running."""

    wait = "wait"
    skip = "skip"
    error = "error"


#: What happens when a save fails. Not a class statement, because `raise` is a keyword.
OnError = Enum("OnError", {"raise": "raise", "warn": "warn", "retry": "retry"})
OnError.__str__ = Word.__str__  # type: ignore[method-assign, assignment]


class Durability(Word):
    """What a committed checkpoint survives."""

    power_cut = "power_cut"  # everything is synced to the disk before the commit
    process_crash = "process_crash"  # files may still be in the page cache


class Commit(Word):
    """How a complete checkpoint becomes visible under its name."""

    rename = "rename"  # its folder is renamed to its final name
    manifest = "manifest"  # manifest.json is created in its folder last; for mounted object stores


class ExportFormat(Word):
    """What committed checkpoints are exported as."""

    none = "none"
    hf = "hf"  # a folder of safetensors files
    safetensors = "safetensors"
    torch = "torch"


class DeltaMode(Word):
    """How the changes between two published versions are encoded."""

    auto = "auto"  # xor with the version before
    overwrite = "overwrite"  # positions and new bytes
    off = "off"  # not at all: each version is whole


class Verify(Word):
    """When checksums are verified. Sizes and structure always are."""

    on_read = "on_read"  # at every load
    on_resume = "on_resume"  # when the manager resumes, not in a plain load
    off = "off"


class Prove(Word):
    """When a load compares what objects give back with what they were given."""

    on_read = "on_read"  # at every load
    on_resume = "on_resume"  # when the manager resumes, not in a plain load
    off = "off"


class ReadMode(Word):
    """Whether ranks on several hosts read a checkpoint together."""

    auto = "auto"  # each byte that several ranks want is read by one, and served to the others
    off = "off"  # each rank reads what it wants


class OnLag(Word):
    """What happens when uploads fall too far behind."""

    warn = "warn"
    error = "error"


class ReplicaCheck(Word):
    """Which bytes of replicated values are compared between the ranks."""

    all = "all"  # every byte, at every save
    sample = "sample"  # pieces of each value, at some saves
    off = "off"


class OnDifferentReplicas(Word):
    """What happens when replicated values are not equal on all ranks."""

    warn = "warn"
    error = "error"


class RecoveryMode(Word):
    """Where the newest snapshot stays for the next run."""

    none = "none"  # nowhere: the next run reads what is durable
    host = "host"  # in this host's memory
    peers = "peers"  # there, and a copy in the memory of another host


class MetricMode(Word):
    """Which value of a metric is the best."""

    min = "min"  # the smallest, such as of a loss
    max = "max"  # the largest, such as of an accuracy


class IoMode(Word):
    """How files are written."""

    auto = "auto"  # whichever makes bytes durable faster in a trial in the folder
    buffered = "buffered"  # through the page cache
    direct = "direct"  # past the page cache


class PageCache(Word):
    """Whether the newest checkpoint stays in the page cache."""

    auto = "auto"  # where memory is plentiful
    off = "off"


class ChecksumName(Word):
    """The checksum algorithm of stored items."""

    crc32 = "crc32"  # always available, from zlib; ten times faster with the package isal
    crc32c = "crc32c"  # needs the package crc32c or google-crc32c
    xxh3_64 = "xxh3_64"  # needs the package xxhash
    auto = "auto"  # the fastest that is installed


class IoPriority(Word):
    """The I/O priority of a writer process."""

    normal = "normal"
    low = "low"
    idle = "idle"

    @classmethod
    def of_ionice_class(cls, number: int | IoPriority | None) -> IoPriority:
        """Convert a class of `ionice`, as NVRx and Megatron take it; a writer never gets more than normal priority."""
        if isinstance(number, IoPriority):
            return number
        return {2: cls.low, 3: cls.idle}.get(number or 0, cls.normal)


@dataclass(frozen=True)
class Range:
    """The range of numbers that a key accepts. It always contains None; the type of the key says whether that is valid.

    Attributes:
        low: the minimum
        high: the maximum
        above: whether `low` itself is excluded
    """

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float | None) -> bool:
        return value is None or (self.low <= value <= self.high and not (self.above and value == self.low))

    def __str__(self) -> str:
        if self.above:
            return f"a finite number above {self.low}"
        return f"at least {self.low}" if self.high == math.inf else f"from {self.low} to {self.high}"

    @classmethod
    def finite_above(cls, low: float) -> Range:
        """Every finite number above a limit."""
        return cls(low, sys.float_info.max, above=True)

    def check(self, key: str, value: float | None) -> None:
        """Raise CheckpointConfigError for a value outside of the range."""
        if value not in self:
            raise CheckpointConfigError(f"{key} must be {self}, got {value}.")


#: Ranges for the keys of components; the constructors of the components check them too.
ARENAS = Range(1, 16)
NICE = Range(0, 19)
WORKERS = Range(1, 128)
BLOCK_BYTES = Range(4096, 1 << 30)
BYTES_PER_SECOND = Range.finite_above(0)


@dataclass(frozen=True)
class ResolvedTimeouts:
    """`timeouts.*` and `max_stall_s` in seconds, with a number for every key that is null in the config.

    Attributes:
        max_stall: maximum time that a save may block training; None: limited only by the timeouts of the phases
        again: maximum time for all retries of a save, including the pauses between them
    """

    worker_start: float = 30.0
    stage: float = 300.0
    write: float = 1800.0
    close: float = 60.0
    heartbeat: float = 30.0
    stall: float = 300.0
    visible: float = 60.0
    max_stall: float | None = None
    again: float = 0.0

    @cached_property
    def whole_save(self) -> float:
        """Maximum time of a save from snapshot to commit, including retries."""
        return self.stage + self.write + self.again

    @property
    def waiting(self) -> float:
        """Maximum time that the call of a save waits for other ranks and for earlier saves."""
        return self.stage if self.max_stall is None else min(self.stage, self.max_stall)
