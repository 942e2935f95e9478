"""Wire what keeps snapshots in memory, if `checkpoint.recovery` asks for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..callers.write_callers import PersistentCaller, WriteCaller
from ..config.hydra.hydra_errors import HydraConfigError
from ..config.schema import Checkpoint, Recovery
from ..core.options import RecoveryMode
from ..core.storage.memory.host_memory import HostMemory
from ..core.storage.memory.keeper_sockets import SocketPlace, memory_root, split_root
from ..core.storage.memory.remote_keeper import HostKeepers, RemoteKeeper
from ..managing.run_context import RunContext
from ..managing.run_memory import RunMemory
from ..saving.context import SaveContext
from ..saving.kept_snapshots import KeptSnapshots
from ..writers.base import Writer


def keeps_snapshots(settings: Checkpoint) -> bool:
    """Whether snapshots stay in memory."""
    return settings.enabled and settings.recovery.mode is RecoveryMode.host


def in_memory(run: RunContext) -> RunContext:
    """A run in the memory of this host's keepers, where this rank's keeper takes what is put."""
    root, rank = memory_root(run.root, run.events.run), run.ranks.rank
    place = split_root(root)
    if place is None:
        raise ValueError(f"{root} is no root in memory")
    own = RemoteKeeper(SocketPlace(*place), rank, now=False)  # its process starts later
    return replace(run, fs=HostMemory(HostKeepers(besides=rank), own), root=root, remote=None)


class SnapshotParts:
    """What a run adds to the graph of its checkpointer so that snapshots stay in memory.

    Args:
        recovery: the settings
        run: the run; its `memory` is where they stay
        earlier: the keepers of the run before
    """

    def __init__(self, recovery: Recovery, run: RunContext, earlier: RunMemory) -> None:
        self._recovery = recovery
        self._run = run
        self._earlier = earlier

    def room(self) -> dict[str, Any]:
        """Arguments for `Stager.connect`: a save to memory does not wait for one that is being written."""
        return {"kept": 1, "in_flight": 1 if self._recovery.every_steps is None else 2}

    def connect(self, caller: WriteCaller, writer: Writer, context: SaveContext) -> KeptSnapshots | None:
        """Have the writer process keep snapshots; None: the run is not known in memory."""
        run, memory, ranks = self._run, self._run.memory, context.ranks
        if memory is None:
            return None
        if not isinstance(caller, PersistentCaller):
            raise HydraConfigError(
                f"checkpoint/recovery=host keeps snapshots in the persistent writer process, and {type(caller).__name__} "
                "has none; use checkpoint/caller=persistent."
            )
        lane = caller.keep_snapshots(run.root, memory.root, ranks.rank, ranks.world_size, self._recovery.lease)
        return KeptSnapshots(lane, writer, context, memory.fs, memory.root, on_first=self._earlier.end_others)
