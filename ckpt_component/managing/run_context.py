"""Context shared by the parts of a manager: the run's checkpoint folder, how steps are named, and the ranks."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..background.jobs import Follower
from ..callers.write_callers import WriteCaller
from ..core.commit.cleanup import BestPolicy
from ..core.commit.names import StepNames
from ..core.commit.scan import Scan, both, scan_steps, warn_of_skipped
from ..core.coordination import Coordinator, Hosts, LocalCoordinator, RankStore, StoreCoordinator, distributed
from ..core.options import ResolvedTimeouts
from ..core.outside import Outside
from ..core.storage.locate import Storages, below, is_url
from ..core.storage.storage import Storage
from ..errors import CheckpointError
from ..events import EventRecorder, LoadReport
from ..formats.writer import Writer
from ..loading.reader import Reader
from ..saving.save_queue import SaveQueue

logger = logging.getLogger(__name__)

#: How many steps a message names one by one.
_NAMED = 8
#: What to advise who is refused a folder and may not want to save there.
RESTORE_ONLY = "A script that only restores sets checkpoint.save.every_steps=null checkpoint.save.at_end=false."


@dataclass(frozen=True)
class RunContext:
    """One run and its folder of checkpoints.

    Attributes:
        fs: file system operations
        root: absolute path of the folder
        names: how steps are named on disk
        ranks: coordinator of the ranks
        timeouts: deadlines
        best: how checkpoints are compared; None: they are not (`keep.best.metric` is null)
        events: records what happens in the folder
        warned: warnings that were logged already, and are not repeated
        elsewhere: returns the storage of a path outside of `root`, a checkpoint of another run or its folder
        remote: the same run with the permanent folder, if `root` is the local folder in front of it; else None
        snapshots: the same run where each snapshot becomes whole first and the newest stay; None: nowhere
        load_options: returns arguments of `Checkpointer.load` for a checkpoint in `root`, given its manifest, by which
            all ranks load what the leading one has found
        hosts: which ranks are on which host
        preset: name of the preset that the run was configured with, for texts; None: unknown
    """

    fs: Storage
    root: str
    names: StepNames
    ranks: Coordinator
    timeouts: ResolvedTimeouts
    best: BestPolicy | None = None
    events: EventRecorder = field(default_factory=EventRecorder)
    warned: set[str] = field(default_factory=set)
    elsewhere: Callable[[str], Storage] = field(default_factory=lambda: Storages().of)
    remote: RunContext | None = None
    snapshots: RunContext | None = None
    load_options: Callable[[Mapping[str, Any]], dict[str, Any]] = field(default=lambda _: {})
    hosts: Hosts = field(default_factory=lambda: Hosts(("",)))
    preset: str | None = None

    def path_of(self, step: int) -> str:
        """Where the checkpoint of a step is, or would be, in `root`."""
        return os.path.join(self.root, self.names.folder(step))

    def step_of(self, path: str) -> int:
        """The inverse of `path_of`."""
        return int(os.path.basename(path).removeprefix(self.names.prefix))

    def nearest(self, step: int) -> str:
        """Where the checkpoint of a step is, or would be; of two places that have it, the nearest."""
        path, remote = self.path_of(step), self.remote
        if remote is None or self.fs.is_folder(path):
            return path
        farther = remote.path_of(step)
        return farther if remote.fs.is_folder(farther) else path

    @property
    def roots(self) -> str:
        """The folders of the run, for a text."""
        return self.root if self.remote is None else f"{self.root} or {self.remote.root}"

    def own_spelling(self, path: str) -> str:
        """A path in a folder of the run as the run spells it; another path, and a URL, as it is."""
        for run in filter(None, (self, self.remote)):
            inside = below(path, run.root)
            if inside:
                return os.path.join(run.root, inside)
        return path

    def storage_of(self, path: str) -> Storage:
        """The storage of a checkpoint, in this folder or elsewhere; a bucket is opened with the options of this run."""
        if path.startswith(f"{self.root}/"):
            return self.fs
        if self.remote is not None:
            return self.remote.storage_of(path)
        return self.elsewhere(path) if is_url(path) or is_url(self.root) else self.fs

    @property
    def saved_in(self) -> Callable[[str], Storage]:
        """Returns the storage that a save of a path goes to."""
        fs, near = self.fs, None if self.snapshots is None else self.snapshots.fs
        return lambda path: fs if near is None or not near.holds(path) else near

    @property
    def unseen(self) -> frozenset[int]:
        """The ranks whose files the leading rank does not look for at each commit; their word is taken for them."""
        apart = self.fs.hosts and self.ranks.is_leader
        return self.hosts.elsewhere(self.ranks.rank) if apart else frozenset()

    def scan(self, known: Mapping[str, Mapping[str, Any]] | None = None) -> Scan:
        """What the folder holds; `known` as for `scan_steps`."""
        return scan_steps(self.fs, self.root, self.names, known)

    def scan_remote(self) -> Scan | None:
        """What the permanent folder holds; None if there is none, or, with a warning, if it cannot be listed."""
        if self.remote is None:
            return None
        try:
            return self.remote.scan()
        except (CheckpointError, OSError) as error:
            why = f"{self.remote.root} cannot be listed; only {self.root} is considered: {error}"
            if why not in self.warned:
                self.warned.add(why)
                logger.warning(why)
            return None

    def scan_all(self) -> Scan:
        """What both folders hold together; warns, once each, of what is not a committed checkpoint in `root`."""
        scan, remote = self.scan(), self.scan_remote()
        warn_of_skipped(scan, self.warned)
        return scan if remote is None else both(scan, remote)

    def note(self, event: str, step: int, path: str) -> None:
        """Record what became of a checkpoint beside its save: `delete`, `quarantine` or `retire`, and where it is."""
        self.events.note({"event": event, "time": round(self.ranks.outside.date(), 6), "step": step, "path": path})

    def best_of(self, scan: Scan) -> list[int]:
        """The steps of committed checkpoints that have the metric of `keep.best`, the best first."""
        if self.best is None:
            return []
        return self.best.ranked({step: scan.metrics[step] for step in scan.committed})


def job_ranks(purpose: str, timeouts: ResolvedTimeouts, outside: Outside) -> Coordinator:
    """Return the coordinator of the ranks of `torch.distributed` if the script has initialized it, else of one rank.

    Args:
        purpose: begins the keys in the store
        timeouts: deadlines
        outside: what one rank runs in; several are processes, which run in the real one
    """
    store = RankStore.of_job(purpose, timeouts.heartbeat)
    if store is not None:
        return StoreCoordinator(store, timeouts.heartbeat, timeouts.stall)
    launched = os.environ.get("WORLD_SIZE", "")
    if distributed() is None and launched.isdigit() and int(launched) > 1:
        logger.warning(
            "WORLD_SIZE is %s and torch.distributed is not initialized, so this rank (RANK=%s) saves and restores on "
            "its own. Ranks that train one model need init_process_group() before build_manager(); independent ones "
            "need a checkpoint.dir each.",
            launched,
            os.environ.get("RANK"),
        )
    return LocalCoordinator(outside)


def steps_text(steps: list[int]) -> str:
    """Format steps for a message; of many, only the first ones and the last."""
    shown = list(map(str, steps))
    if len(shown) > _NAMED:
        shown = [*shown[: _NAMED - 1], f"... ({len(steps)} in all), {shown[-1]}"]
    return ", ".join(shown)


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
