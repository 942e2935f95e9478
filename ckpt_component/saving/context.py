"""What is the same for every save of a run, and how the run takes part in its saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..core.commit.commit import refuse_existing
from ..core.coordination import Coordinator
from ..core.image.unchanged_files import FileReuse
from ..core.options import ResolvedTimeouts
from ..core.progress import Progress, no_progress
from ..core.storage.storage import Storage
from ..events import EventRecorder, SaveReport
from .replica_comparison import ReplicaPolicy
from .retry import ErrorPolicy


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
        replicas: what is compared between the ranks
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
    replicas: ReplicaPolicy = field(default_factory=ReplicaPolicy)
    reuse: FileReuse = field(default_factory=lambda: FileReuse(None))
    queue: str = ""
    unseen: frozenset[int] = frozenset()
