"""What became of one save, and of one load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: When a phase began and ended, in seconds since the call.
Span = tuple[float, float]


@dataclass(frozen=True)
class SaveReport:
    """The outcome of one save. Times are seconds since the call of `save`.

    Attributes:
        path: the checkpoint's path
        outcome: `committed`, `failed`, or `skipped` (by `overlap: skip`, or by `max_stall_s` with `on_error: warn`).
            While the save is running, listeners are given it as `staged` and `written`.
        step: the training step, if a manager made the save
        error: the error text of a failed or skipped save
        bytes: written by this rank, in all files
        reused: size of this rank's files that were not written, because the checkpoint before has the same
        files: number of files, including the manifest
        items: number of tensors and objects stored; tied tensors count once
        stall_s: how long the call blocked training
        staged_s: when training could change the tensors again
        written_s: when this rank's files were durable
        committed_s: when the checkpoint was visible, on all ranks
        write_s: how long the write itself took
        attempts: number of attempts, with `on_error: retry`
        time: when `save` was called, seconds since 1970
        spans: by phase (`plan`, `memory`, `stage`, `queue`, `write`, `sync`, `vote`, `commit`), when it began and
            ended; of several attempts, the last one's. A phase that did not take place is missing.
        lost_s: the stall, plus an estimate of how much longer than others the steps took that ran beside the save
        host_memory_bytes: host memory that this rank holds for snapshots
        memory: whether the save was to memory alone (`checkpoint.recovery.every_steps`), and nothing was written
        sent: bytes of replicas of other ranks that this rank has received (`checkpoint/recovery=peers`), for
            `on_at_peers`; 0 before
        at_peers_s: when the snapshots of all ranks were at their peers, for `on_at_peers`; 0 before
    """

    path: str
    outcome: str = "committed"
    step: int | None = None
    error: str | None = None
    bytes: int = 0
    reused: int = 0
    files: int = 0
    items: int = 0
    stall_s: float = 0.0
    staged_s: float = 0.0
    written_s: float = 0.0
    committed_s: float = 0.0
    write_s: float = 0.0
    attempts: int = 1
    time: float = 0.0
    spans: Mapping[str, Span] = field(default_factory=dict)
    lost_s: float = 0.0
    host_memory_bytes: int = 0
    memory: bool = False
    sent: int = 0
    at_peers_s: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it took until it was committed, or had failed."""
        return max([self.stall_s, *(end for _, end in self.spans.values())])

    @property
    def write_gbps(self) -> float:
        """Write throughput in gigabytes (1e9 bytes) per second."""
        return self.bytes / 1e9 / self.write_s if self.write_s > 0 else 0.0

    def event(self) -> dict[str, Any]:
        """The record for the event file."""
        names = "time step path memory outcome error bytes reused files items attempts spans stall_s lost_s"
        return {"event": "save", **_values(self, f"{names} host_memory_bytes"), "gbps": round(self.write_gbps, 3)}

    def peers_event(self) -> dict[str, Any]:
        """The record for the event file that a snapshot is at its peers."""
        return {"event": "peers", **_values(self, "time step path bytes sent at_peers_s")}


@dataclass(frozen=True)
class LoadReport:
    """The outcome of one load, by `CheckpointManager.restore` or `Checkpointer.load`.

    Attributes:
        path: the checkpoint's path
        outcome: `loaded` or `failed`
        step: the step that was restored; of a load path by path, the step in the checkpoint's name, or None
        error: the error text of a failed load
        bytes: size of the checkpoint's files, whether this rank read all of them or not
        source: `memory` if the bytes came from the memory of this host's servers; `peer` if some of this rank's came
            from those of another host; else `storage`
        verified: whether what was read was compared with the checkpoint's checksums
        proven: keys of the objects that gave back all that they were given, bit for bit; empty: nothing was compared
        differing: keys of the values that objects did not give back as they were given
        time: when the load began, seconds since 1970
        spans: by phase (`open`, `match`, `read`; from memory also `verify`), when it began and ended, in seconds since
            `time`
        seconds: how long the load took
    """

    path: str
    outcome: str = "loaded"
    step: int | None = None
    error: str | None = None
    bytes: int = 0
    source: str = "storage"
    verified: bool = False
    proven: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    time: float = 0.0
    spans: Mapping[str, Span] = field(default_factory=dict)
    seconds: float = 0.0

    def event(self) -> dict[str, Any]:
        """The record for the event file."""
        return {
            "event": "load",
            **_values(self, "time step path outcome error bytes source verified proven differing spans seconds"),
        }


def _values(report: SaveReport | LoadReport, names: str) -> dict[str, Any]:
    return {name: _rounded(getattr(report, name)) for name in names.split()}


def _rounded(value: Any) -> Any:
    """A value with its times to the microsecond."""
    if isinstance(value, Mapping):
        return {name: [round(begin, 6), round(end, 6)] for name, (begin, end) in value.items()}
    return round(value, 6) if isinstance(value, float) else value
