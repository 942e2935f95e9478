"""`SnapshotParts`: what `checkpoint/recovery=host` adds to the graph. Imported only by runs that keep snapshots."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..callers.memory_caller import MemoryCaller
from ..callers.write_callers import PersistentCaller, WriteCaller
from ..config.hydra.hydra_errors import HydraConfigError
from ..config.schema import Checkpoint
from ..core.coordination import Coordinator, Hosts
from ..core.storage.memory.host_memory import HostMemory
from ..core.storage.memory.keeper_sockets import SocketPlace, memory_root, split_root
from ..core.storage.memory.remote_keeper import HostKeepers, RemoteKeeper
from ..core.storage.storage import Storage
from ..loading.nearest import NearestReader
from ..managing.run_context import RunContext
from ..managing.run_memory import RunMemory
from ..saving.kept_snapshots import KeepingLane
from ..saving.save_lane import SaveLane
from ..writers.base import Writer

logger = logging.getLogger(__name__)


class SnapshotParts:
    """What a run that keeps snapshots in memory has beside other runs.

    Args:
        settings: the config

    Attributes:
        reader: the class of the reader
        earlier: the keepers of the run before; set by `begin`
    """

    reader = NearestReader

    def __init__(self, settings: Checkpoint) -> None:
        self._settings = settings.recovery
        self._arenas = settings.stager.get("arenas", 1)
        self._memory = HostMemory()
        self.earlier: RunMemory | None = None

    def with_memory(self, storage_of: Callable[[str], Storage]) -> Callable[[str], Storage]:
        """The storage of a path, which may be in the memory of this host's keepers; there, to read only."""
        memory = self._memory
        return lambda path: memory if memory.holds(path) else storage_of(path)

    def begin(self, run: RunContext) -> RunContext:
        """The run with its memory, where this rank's keeper takes what is put."""
        root, rank = memory_root(run.root, run.events.run), run.ranks.rank
        place = split_root(root)
        if place is None:
            raise ValueError(f"{root} is no root in memory")
        own = RemoteKeeper(SocketPlace(*place), rank, now=False)  # its process starts later
        self.earlier = RunMemory(run)
        return replace(run, memory=replace(run, fs=HostMemory(HostKeepers(besides=rank), own), root=root, remote=None))

    def room(self) -> dict[str, Any]:
        """Arguments for `Stager.connect`: a snapshot need not wait for one that is still being written."""
        return {"kept": 1, "in_flight": 1 if self._settings.every_steps is None else 2}

    def lane(self, caller: WriteCaller, writer: Writer, ranks: Coordinator, run: RunContext) -> Callable[..., SaveLane]:
        """Have the writer process keep snapshots. Returns the `lane` of the pipeline."""
        memory, earlier = run.memory, self.earlier
        if memory is None or earlier is None:
            return SaveLane
        if not isinstance(caller, PersistentCaller):
            raise HydraConfigError(
                f"checkpoint/recovery=host keeps snapshots in the persistent writer process, and "
                f"{type(caller).__name__} has none; use checkpoint/caller=persistent."
            )
        if ranks.is_leader:
            self._tell(run.hosts)
        connect = caller.keep_snapshots(run.root, memory.root, ranks.rank, ranks.world_size, self._settings.lease)
        return partial(
            KeepingLane,
            caller=MemoryCaller(connect),
            writer=writer,
            memory=memory.fs,
            path_of=lambda path: memory.path_of(run.step_of(path)),
            on_kept=lambda report: earlier.end_others(),
        )

    def _tell(self, hosts: Hosts) -> None:
        room = self.room()
        images = room["kept"] + max(self._arenas, room["in_flight"])
        text = "checkpoint/recovery=host: each rank has up to %d images of its state in host memory, one of which stays"
        logger.info(text, images)
        if hosts.several:
            logger.warning(
                "checkpoint/recovery=host: the %d ranks are on %d hosts, and a run is restored from memory only if all "
                "are on one host; else from its checkpoints",
                len(hosts.names),
                len(set(hosts.names)),
            )
