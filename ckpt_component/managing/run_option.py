"""What an option of a config adds to a run, and what has snapshots of a run beside its folders.

The factory makes a run of what every run has, and asks each option that is on for what it adds. An option is one
module, which is imported only then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ..background.jobs import Follower
from ..callers.write_callers import WriteCaller
from ..core.commit.scan import Scan
from ..core.storage.storage import Storage
from ..events import LoadReport
from ..formats.writer import Writer
from ..loading.reader import Reader
from ..saving.save_queue import SaveQueue
from .run_context import RunContext

#: What an option may put another one in the place of: what returns the storage of a path, and what makes a part.
StorageOf = Callable[[str], Storage]
MakeReader = Callable[..., Reader]
MakeQueue = Callable[..., SaveQueue]


class SnapshotSource(ABC):
    """Has snapshots that a run may begin with, nearer than its folders.

    For a restore, each rank offers what it sees; the leading rank looks, and tells the others what they need to load
    what it has found, so that they join. What was found stays until `let_go`.

    Attributes:
        name: what it is, for texts
        advice: how to get past what it has, for the error if nothing else is left
    """

    name: str
    advice: str

    @abstractmethod
    def offer(self) -> Any:
        """What this rank tells the leading one, as JSON values."""

    @abstractmethod
    def look(self, offers: Sequence[Any]) -> bool:
        """On the leading rank: look for whole snapshots; returns whether there are any. A failure is logged.

        Args:
            offers: those of all ranks
        """

    @abstractmethod
    def found(self, scan: Scan) -> tuple[RunContext, Scan] | None:
        """On the leading rank: the run in the place of what `look` has found, and the committed steps there.

        None: there are none, or they are stale.

        Args:
            scan: of the folders of the run
        """

    @abstractmethod
    def told(self) -> Any:
        """On the leading rank: what all ranks need to load what was found, as JSON values; None: there is nothing."""

    @abstractmethod
    def join(self, told: Any) -> None:
        """On all ranks: use what the leading rank has found."""

    @abstractmethod
    def place(self, loaded: LoadReport) -> str:
        """Where this rank has loaded a snapshot from, for the log."""

    @abstractmethod
    def drop(self, path: str) -> None:
        """On the leading rank: delete a snapshot that cannot be used. A failure is logged."""

    @abstractmethod
    def drop_after(self, step: int | None) -> None:
        """On the leading rank: delete the snapshots of steps that follow this one; None: all."""

    @abstractmethod
    def let_go(self) -> None:
        """What was found is needed no longer, as the run begins with something else."""


class RunOption:
    """What an option of the config adds to a run; here nothing.

    A checkpointer without a manager asks for `storage_of`, `staging`, `reader` and `queue` alone.
    """

    def begin_alone(self) -> None:
        """There is no manager."""

    def storage_of(self, storage_of: StorageOf) -> StorageOf:
        """What returns the storage of a path, given what does so without this option."""
        return storage_of

    def begun(self, storage: Storage, root: str) -> Any:
        """On the leading rank: what `join` needs on all ranks, as JSON values.

        Args:
            storage: of the nearest folder
            root: that folder, as this rank spells it
        """

    def join(self, run: RunContext, begun: Any, *, saves: bool) -> RunContext:
        """On all ranks: the run with this option.

        Args:
            run: the run so far
            begun: what `begun` has returned on the leading rank
            saves: whether the run saves
        """
        return run

    def followers(self, run: RunContext, *, saves: bool) -> Sequence[Follower]:
        """What this rank owns of what works with the checkpoints of the run."""
        return ()

    def sources(self) -> Sequence[SnapshotSource]:
        """What may have snapshots of the run that was before."""
        return ()

    def staging(self) -> dict[str, Any]:
        """Arguments for `Stager.connect`."""
        return {}

    def reader(self, reader: MakeReader) -> MakeReader:
        """What makes the reader, given what does so without this option."""
        return reader

    def queue(
        self, queue: MakeQueue, run: RunContext, caller: WriteCaller, writer: Writer, followers: Sequence[Follower]
    ) -> MakeQueue:
        """What makes the queue of a run that saves, given what does so without this option.

        Args:
            queue: that
            run: the run
            caller: has the writer called
            writer: writes
            followers: those of the run
        """
        return queue

    def abandon(self) -> None:
        """The run could not be built: end what was begun for it. When it is there, it ends its followers."""
