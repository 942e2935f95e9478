"""What is the same for every save of a run, what each phase of one returns, and the report made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from ..config.schema import Checkpoint
from ..core.commit.commit import refuse_existing
from ..core.commit.protocol import Attempt
from ..core.coordination import Coordinator
from ..core.image.unchanged_files import FileReuse
from ..core.options import ResolvedTimeouts
from ..core.outside import OUTSIDE
from ..core.progress import Progress, no_progress
from ..core.storage.locate import MEMORY
from ..core.storage.storage import Storage
from ..events import EventRecorder, SaveReport
from ..stagers.base import Snapshot, StatePlan
from .replica_comparison import ReplicaComparison
from .retry import ErrorPolicy


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


class Ownership(Protocol):
    """The claim of a run to the folder that it saves in, as `FencingToken`."""

    token: str

    def acquire(self) -> None:
        """Called before files are made; raises if another run has taken the folder."""

    def check_after(self, error: Exception) -> None:
        """Called after a failure; raises if the reason may be that another run has taken the folder."""


class RunHooks(Protocol):
    """Hooks of a run for each of its saves, called on rank 0 only."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """Small files that rank 0 adds to every checkpoint, by name."""

    @property
    def manifest_fields(self) -> Mapping[str, Any]:
        """Plain values for every manifest."""

    @property
    def ownership(self) -> Ownership:
        """The claim to the checkpoint folder; the first save acquires it."""

    def check_path(self, path: str) -> None:
        """Called before a save begins; an exception stops the save."""

    def after_commit(self, report: SaveReport) -> None:
        """Called on the save thread before the save's future is done."""

    def after_save(self, report: SaveReport) -> None:
        """Called on the save thread after the save's future is done; the next save and `close` wait for it."""

    def make_room(self) -> None:
        """Called on the save thread if there is no room for a save; returns when there may be more."""

    def close(self) -> None:
        """Called on the save thread when all saves have ended and no other begins; raises nothing."""


class NoOwner:
    """Nobody owns the folder."""

    token = ""

    def acquire(self) -> None:
        """There is nothing to acquire."""

    def check_after(self, error: Exception) -> None:
        """No other run can have taken the folder."""


class NoRun:
    """The saves belong to no run: the caller chooses the paths, which must be free.

    Args:
        storage_of: returns the storage of a path
        single_file: `Writer.single_file`
    """

    def __init__(self, storage_of: Callable[[str], Storage], single_file: str = "") -> None:
        self.ownership = NoOwner()
        self.files: Mapping[str, bytes] = {}
        self.manifest_fields: Mapping[str, Any] = {}
        self._storage_of = storage_of
        self._single_file = single_file

    def check_path(self, path: str) -> None:
        """Raise CheckpointExistsError if the path is taken."""
        refuse_existing(self._storage_of(path), path, file=self._single_file)

    def after_commit(self, report: SaveReport) -> None:
        """Nothing follows."""

    def after_save(self, report: SaveReport) -> None:
        """Nothing follows."""

    def make_room(self) -> None:
        """Nothing is deleted."""

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class SaveContext:
    """What is the same for every save of a checkpointer.

    Attributes:
        ranks: coordinator of the ranks; owned by the pipeline
        storage_of: returns the storage of a path
        timeouts: deadlines
        run: how the run takes part
        policy: what to do about saves that fail
        events: records saves, and calls listeners; owned too
        progress: follows the bytes of saves that are waited for
        settings: the config
        reuse: decides which files are shared with the last checkpoint; the stager has the same
        queue: begins the names of the ranks' questions about attempts, as two queues may ask about one save at a time
        unseen: the ranks whose files this rank cannot see, because they are in the memory of other hosts
    """

    ranks: Coordinator
    storage_of: Callable[[str], Storage]
    timeouts: ResolvedTimeouts
    run: RunHooks
    policy: ErrorPolicy = field(default_factory=ErrorPolicy)
    events: EventRecorder = field(default_factory=EventRecorder)
    progress: Progress = no_progress
    settings: Checkpoint = field(default_factory=Checkpoint)
    reuse: FileReuse = field(default_factory=lambda: FileReuse(None))
    queue: str = ""
    unseen: frozenset[int] = frozenset()
