"""What each phase of a save returns, and the report that is made of them.

A record is complete when its phase returns it, and nobody writes into it. Times are of `time.perf_counter`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.commit.names import Attempt
from ..core.storage.storage import Storage
from ..events import SaveReport
from ..stagers.base import Snapshot, StatePlan
from .planning import Comparison

#: By phase, when it began and ended.
Marks = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class SaveRequest:
    """What the caller of `save` asks for.

    Attributes:
        path: absolute path of the new checkpoint.
        storage: of that path.
        step: the training step, if a manager saves.
        metrics: numbers by name, such as a validation loss, as the caller passed them.
        may_wait: whether the save may wait for the memory of an earlier one.
        started: when the call began.
        time: the same, seconds since 1970.
    """

    path: str
    storage: Storage
    step: int | None = None
    metrics: Mapping[str, Any] | None = None
    may_wait: bool = True
    started: float = field(default_factory=time.perf_counter)
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Admitted:
    """All ranks have agreed that a save takes place.

    Attributes:
        request: what was asked for.
        plan: the inspected state.
        number: number of the save in its checkpointer, the same on all ranks.
        token: of the first attempt; the same on all ranks.
        manifest_fields: plain values for the manifest, beside those of all saves; on rank 0 they are written.
    """

    request: SaveRequest
    plan: StatePlan
    number: int
    token: str
    manifest_fields: Mapping[str, Any]


@dataclass(frozen=True)
class Staged:
    """This rank's snapshot of an admitted save was taken, or could not be. As a context manager it releases its memory.

    Attributes:
        admitted: the save.
        attempt: the first attempt.
        snapshot: what this rank writes; None if it could not be taken.
        error: why this rank has no snapshot.
        comparison: what to compare with other ranks, if they do so in this save.
        host_bytes: host memory that this rank holds for snapshots.
        stall_s: how long the call has blocked training so far.
    """

    admitted: Admitted
    attempt: Attempt
    snapshot: Snapshot | None = None
    error: Exception | None = None
    comparison: Comparison | None = None
    host_bytes: int = 0
    stall_s: float = 0.0

    @property
    def request(self) -> SaveRequest:
        """What was asked for."""
        return self.admitted.request

    @property
    def file_bytes(self) -> int:
        """Approximate size of the files that this rank writes."""
        return 0 if self.snapshot is None else self.snapshot.encoded.file_bytes

    @property
    def items(self) -> int:
        """Number of tensors and objects that this rank stores."""
        if self.snapshot is None:
            return 0
        encoded = self.snapshot.encoded
        return encoded.table.item_count + sum(len(blob.items) for blob in encoded.object_blobs)

    @property
    def marks(self) -> Marks:
        """The phases until the snapshot was complete, if it is."""
        snapshot = self.snapshot
        if snapshot is None or not snapshot.staged_at:
            return {}
        memory = {"memory": (snapshot.planned_at, snapshot.began_at)} if snapshot.planned_at else {}
        planned = self.request.started, snapshot.planned_at or snapshot.began_at
        return {"plan": planned, **memory, "stage": (snapshot.began_at, snapshot.staged_at)}

    @property
    def fields(self) -> Mapping[str, Any]:
        """What it adds to the report."""
        return {"items": self.items, "host_memory_bytes": self.host_bytes, "stall_s": self.stall_s}

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *_: object) -> None:
        if self.snapshot is not None:
            self.snapshot.release()


@dataclass(frozen=True)
class Written:
    """This rank's files of one attempt are written.

    Attributes:
        result: a `WriteResult`.
        number: of the attempt, from 1.
        staged_at: when the snapshot was complete.
    """

    result: Mapping[str, Any]
    number: int
    staged_at: float

    @property
    def ended(self) -> float:
        """When the files were durable."""
        return float(self.result["began"] + self.result["seconds"])

    @property
    def marks(self) -> Marks:
        """The phases of the write."""
        began, synced_from = self.result["began"], self.result["synced_from"]
        return {
            "queue": (self.staged_at, began),
            "write": (began, synced_from),
            "sync": (synced_from, self.ended),
        }

    @property
    def fields(self) -> Mapping[str, Any]:
        """What it adds to the report."""
        return {"bytes": self.result["bytes"], "write_s": self.result["seconds"], "attempts": self.number}


@dataclass(frozen=True)
class Committed:
    """The checkpoint is visible, on all ranks.

    Attributes:
        written: this rank's part.
        files: number of the checkpoint's files.
        voted: when all ranks had written their files.
        ended: when the checkpoint was visible.
    """

    written: Written
    files: int
    voted: float
    ended: float = field(default_factory=time.perf_counter)

    @property
    def marks(self) -> Marks:
        """The phases after the write."""
        return {"vote": (self.written.ended, self.voted), "commit": (self.voted, self.ended)}

    @property
    def fields(self) -> Mapping[str, Any]:
        """What it adds to the report."""
        return {"files": self.files}


def report_of(request: SaveRequest, outcome: str, *reached: Staged | Written | Committed, **more: Any) -> SaveReport:
    """The report of a save.

    Args:
        request: what was asked for.
        outcome: see `SaveReport`.
        *reached: what its phases have returned, in order.
        **more: other values of the report.
    """
    fields, spans = dict[str, Any](), dict[str, tuple[float, float]]()
    for record in reached:
        fields.update(record.fields)
        for phase, (began, ended) in record.marks.items():
            spans[phase] = (began - request.started, max(ended, began) - request.started)
    fields.update(more)
    ends = {phase: end for phase, (_, end) in spans.items()}
    return SaveReport(
        path=request.path,
        outcome=outcome,
        step=request.step,
        time=request.time,
        staged_s=ends.get("stage", 0.0),
        written_s=ends.get("vote", 0.0),
        committed_s=ends.get("commit", 0.0),
        spans=spans,
        lost_s=fields.get("stall_s", 0.0),
        **fields,
    )
