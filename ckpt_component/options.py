"""Options that the library and its configs share: the words of the configs as enums, and the ranges of numbers."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from enum import Enum

from .errors import CheckpointConfigError


class Naming(Enum):
    """How checkpoints are called in `checkpoint.dir`."""

    megatron = "megatron"  # iter_0000200 and latest_checkpointed_iteration.txt
    step = "step"  # step_00000200 and latest


class Overlap(Enum):
    """What happens to a save that comes while the one before it still runs."""

    wait = "wait"
    skip = "skip"
    error = "error"


#: What happens when a save fails. Not a class, because `raise` is a word of the language.
OnError = Enum("OnError", {"raise": "raise", "warn": "warn", "retry": "retry"})


class Durability(Enum):
    """What a committed checkpoint survives."""

    power_cut = "power_cut"  # everything is synced to the disk before the commit
    process_crash = "process_crash"  # the kernel's cache is trusted


class Commit(Enum):
    """How a checkpoint becomes visible, whole, under its name."""

    rename = "rename"  # its folder is renamed to its name
    manifest = "manifest"  # manifest.json is put into its folder last; for object stores that are mounted


class Verify(Enum):
    """When the checksums of what is read are compared. Sizes and structure always are."""

    on_read = "on_read"  # at every load
    on_resume = "on_resume"  # when the manager resumes, not in a plain load
    off = "off"


class IoMode(Enum):
    """How files are written."""

    auto = "auto"  # whichever makes bytes durable sooner in the folder, by a trial
    buffered = "buffered"  # through the page cache
    direct = "direct"  # past it


class ChecksumName(Enum):
    """The checksum that every item is stored with."""

    crc32 = "crc32"  # always there: by zlib, and ten times faster by the package isal
    crc32c = "crc32c"  # needs the package crc32c or google-crc32c
    xxh3_64 = "xxh3_64"  # needs the package xxhash
    auto = "auto"  # the fastest that is installed


class IoPriority(Enum):
    """How a writer process queues for the disk."""

    normal = "normal"
    low = "low"
    idle = "idle"


@dataclass(frozen=True)
class Range:
    """The numbers that a key takes; None is for the key's type to allow.

    Attributes:
        low: the least.
        high: the greatest.
        above: `low` itself is too little.
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
        """Every number above a limit but infinity."""
        return cls(low, sys.float_info.max, above=True)

    def check(self, key: str, value: float | None) -> None:
        """Raise CheckpointConfigError for a value that is not in the range."""
        if value not in self:
            raise CheckpointConfigError(f"{key} must be {self}, got {value}.")


#: Ranges of the keys of parts; their constructors check them too.
ARENAS = Range(1, 16)
DEVICE_BUFFER_BYTES = Range(0)
NICE = Range(0, 19)
WORKERS = Range(1, 128)
BLOCK_BYTES = Range(4096, 1 << 30)
BYTES_PER_SECOND = Range.finite_above(0)


@dataclass(frozen=True)
class ResolvedTimeouts:
    """`timeouts.*` and `max_stall_s` in seconds, with a number for every key that is null in the config.

    Attributes:
        max_stall: how long a save may keep training waiting; None: as long as the phases may take.
        again: what all further attempts of a save may take, pauses included.
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

    @property
    def whole_save(self) -> float:
        """What a save may take from its snapshot to its commit, with all attempts."""
        return self.stage + self.write + self.again

    @property
    def waiting(self) -> float:
        """How long the call of a save may wait for other ranks and for earlier saves."""
        return self.stage if self.max_stall is None else min(self.stage, self.max_stall)
