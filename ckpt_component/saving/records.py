"""What each phase of a save returns, and the report that is made of them.

A record is complete when its phase returns it, and nobody writes into it. Times are of `time.perf_counter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from ..core.commit.protocol import Attempt
from ..core.outside import OUTSIDE
from ..core.storage.locate import MEMORY
from ..core.storage.storage import Storage
from ..events import SaveReport
from ..stagers.base import Snapshot, StatePlan
from .replica_comparison import ReplicaComparison


@dataclass(frozen=True)
class SaveRequest:
    """What the caller of `save` asks for.

    Attributes:
        path: absolute path of the new checkpoint
        storage: of that path
        step: the training step, if a manager saves
        metrics: numbers by name, such as a validation loss, as the caller passed them
        may_wait: whether the save may wait for the memory of an earlier one
        started: when the call began
        time: the same, seconds since 1970
        is_told: whether listeners and the log are told of its phases; not of those of a save that goes to two places,
            and is told of for the other
    """

    path: str
    storage: Storage
    step: int | None = None
    metrics: Mapping[str, Any] | None = None
    may_wait: bool = True
    started: float = field(default_factory=perf_counter)
    time: float = field(default_factory=OUTSIDE.date)
    is_told: bool = True


@dataclass(frozen=True)
class Admitted:
    """All ranks have agreed that a save takes place.

    Attributes:
        request: what was asked for
        plan: the inspected state
        number: number of the save in its checkpointer, the same on all ranks
        token: of the first attempt; the same on all ranks
        manifest_fields: plain values for the manifest, beside those of all saves; on rank 0 they are written
    """

    request: SaveRequest
    plan: StatePlan
    number: int
    token: str
    manifest_fields: Mapping[str, Any]


@dataclass(frozen=True)
class Staged:
    """This rank's snapshot of an admitted save was taken, or could not be.

    Attributes:
        admitted: the save
        attempt: the first attempt
        snapshot: what this rank writes; None if it could not be taken
        error: why this rank has no snapshot
        comparison: what to compare with other ranks, if they do so in this save
        host_bytes: host memory that this rank holds for snapshots
        stall_s: how long the call has blocked training so far
    """

    admitted: Admitted
    attempt: Attempt
    snapshot: Snapshot | None
    error: Exception | None
    comparison: ReplicaComparison | None
    host_bytes: int
    stall_s: float


@dataclass(frozen=True)
class Written:
    """This rank's files of one attempt are written.

    Attributes:
        result: a `WriteResult`
        number: of the attempt, from 1
    """

    result: Mapping[str, Any]
    number: int


@dataclass(frozen=True)
class Committed:
    """The checkpoint is visible, on all ranks.

    Attributes:
        written: this rank's part
        files: number of the checkpoint's files
        voted: when all ranks had written their files
        ended: when the checkpoint was visible
    """

    written: Written
    files: int
    voted: float
    ended: float = field(default_factory=perf_counter)


def report_of(
    request: SaveRequest,
    outcome: str,
    staged: Staged | None = None,
    written: Written | None = None,
    committed: Committed | None = None,
    **more: Any,
) -> SaveReport:
    """The report of a save.

    Args:
        request: what was asked for
        outcome: see `SaveReport`
        staged: what its phases have returned, as far as it has come
        written: see `staged`
        committed: see `staged`
        **more: other values of the report, or other than theirs
    """
    values, marks = dict[str, Any](), dict[str, tuple[float, float]]()
    ended = request.started
    if staged is not None:
        values.update(stall_s=staged.stall_s, host_memory_bytes=staged.host_bytes)
        snapshot = staged.snapshot
        if snapshot is not None:
            values["items"] = snapshot.encoded.item_count
        if snapshot is not None and snapshot.staged_at:
            began, ended = snapshot.began_at, snapshot.staged_at
            marks["plan"] = request.started, snapshot.planned_at or began
            if snapshot.planned_at:
                marks["memory"] = snapshot.planned_at, began
            marks["stage"] = began, ended
    if written is not None:
        result = written.result
        values.update(
            bytes=result["bytes"], reused=result["shared"], write_s=result["seconds"], attempts=written.number
        )
        began, synced_from = result["began"], result["synced_from"]
        marks.update(queue=(ended, began), write=(began, synced_from))
        ended = began + result["seconds"]
        marks["sync"] = synced_from, ended
    if committed is not None:
        values["files"] = committed.files
        marks.update(vote=(ended, committed.voted), commit=(committed.voted, committed.ended))
    values.update(more)
    spans, zero = {}, (0.0, 0.0)
    for phase, (began, ended) in marks.items():
        spans[phase] = began - request.started, max(ended, began) - request.started
    return SaveReport(
        path=request.path,
        outcome=outcome,
        step=request.step,
        time=request.time,
        staged_s=spans.get("stage", zero)[1],
        written_s=spans.get("vote", zero)[1],
        committed_s=spans.get("commit", zero)[1],
        spans=spans,
        lost_s=values.get("stall_s", 0.0),
        memory=request.path.startswith(MEMORY),
        **values,
    )
