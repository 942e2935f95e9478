"""`RunSnapshots`: what `checkpoint/recovery` adds to a run. Imported only by runs that keep snapshots in memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..background.jobs import Follower
from ..callers.write_callers import MemoryCaller, PersistentCaller, WriteCaller
from ..config.hydra.hydra_errors import HydraConfigError
from ..config.rules import ImageCount
from ..config.schema import Checkpoint
from ..core.commit.fencing import lineage_of
from ..core.coordination import Hosts
from ..core.options import RecoveryMode
from ..core.outside import OUTSIDE, Outside
from ..core.storage.storage import Storage
from ..core.writing.process import WriterProgram
from ..errors import CheckpointError
from ..formats.writer import Writer
from ..hosts.client import HostClient, HostClients
from ..hosts.host_memory import HostMemory
from ..hosts.snapshot_source import JobClients, NearestReader, RunMemory
from ..hosts.snapshots import NewestStays, PeerMap, SnapshotMemory, SnapshotsAtPeers, TieredSaveQueue
from ..hosts.wire import SocketPlace, memory_root
from ..managing.run_context import MakeQueue, MakeReader, RunContext, RunOption, StorageOf

logger = logging.getLogger(__name__)


class RunSnapshots(RunOption):
    """What a run that keeps snapshots in memory has beside other runs.

    Args:
        settings: the config
        outside: what the run runs in
    """

    def __init__(self, settings: Checkpoint, outside: Outside = OUTSIDE) -> None:
        self._settings, self._outside = settings.recovery, outside
        self._arenas = settings.stager.get("arenas", 1)
        self._clients = JobClients(outside)
        self._mode = f"checkpoint/recovery={self._settings.mode}"
        #: How many images there are, and the snapshots of the run before; set by `join`, which knows the hosts.
        self._images = ImageCount.of(self._settings, self._arenas, hosts=1)
        self._earlier: RunMemory | None = None

    def begin_alone(self) -> None:
        """See the base class: nobody keeps what this process saves."""
        logger.info("%s: without a manager nothing stays in memory; loads take what others keep", self._mode)

    def storage_of(self, storage_of: StorageOf) -> StorageOf:
        """See the base class: a path may be in the memory of servers, where it is only read."""
        memory = HostMemory(self._clients, outside=self._outside)
        return lambda path: memory if memory.holds(path) else storage_of(path)

    def begun(self, storage: Storage, root: str) -> Any:
        """See the base class: the folder, and the tokens of the runs that have owned it so far, the last one first."""
        try:
            return [root, lineage_of(storage, root)]
        except (CheckpointError, OSError) as error:
            logger.warning("the runs before this one, which may have snapshots in memory, are unknown: %s", error)
            return [root, []]

    def join(self, run: RunContext, begun: Any, *, saves: bool) -> RunContext:
        """See the base class: this rank's server takes what is put there."""
        named, lineage = begun
        root, rank, outside = memory_root(named, run.events.run), run.ranks.rank, self._outside
        own = HostClient(SocketPlace.of(root, outside), rank, now=False)  # its process starts later
        self._images = ImageCount.of(self._settings, self._arenas, len(set(run.hosts.names)))
        self._earlier = RunMemory(run, lineage, self._clients, has_peers=bool(self._images.copies))
        memory = HostMemory(HostClients(besides=rank, outside=outside), own, outside)
        return replace(run, snapshots=replace(run, fs=memory, root=root, remote=None))

    def sources(self) -> Sequence[RunMemory]:
        """See the base class."""
        return [*filter(None, [self._earlier])]

    def staging(self) -> dict[str, Any]:
        """See the base class: a snapshot need not wait for one that is still being written, or sent."""
        return {"kept": self._images.staying, "in_flight": self._images.in_flight}

    def reader(self, reader: MakeReader) -> MakeReader:
        """See the base class."""
        return partial(NearestReader, clients=self._clients)

    def queue(
        self, queue: MakeQueue, run: RunContext, caller: WriteCaller, writer: Writer, followers: Sequence[Follower]
    ) -> MakeQueue:
        """See the base class: the writer process keeps snapshots."""
        kept, earlier, ranks = run.snapshots, self._earlier, run.ranks
        if kept is None or earlier is None:
            return queue
        if not isinstance(caller, PersistentCaller):
            raise HydraConfigError(
                f"{self._mode} keeps snapshots in the persistent writer process, and {type(caller).__name__} has none; "
                "use checkpoint/caller=persistent."
            )
        if ranks.is_leader:
            self._tell(run.hosts)
        here, lease = run.fs.here(run.root), self._settings.lease
        job = {"folder": here, "root": kept.root, "rank": ranks.rank, "world_size": ranks.world_size, "lease": lease}
        connect = caller.runs(WriterProgram("ckpt_component.hosts.keep", job))
        stays, hooks = NewestStays(), [lambda _: earlier.end_others()]
        if self._images.copies:
            # What the run before has at its peers is needed until this one has something there.
            peers, hooks = PeerMap.agree(run, self._settings), []
            stays = SnapshotsAtPeers(peers, MemoryCaller(connect, ranks.outside), run, earlier.end_others)
        hooks += [follower.on_kept for follower in followers]
        memory = SnapshotMemory(MemoryCaller(connect, ranks.outside), writer, kept.fs, kept.root, hooks, stays)
        return partial(TieredSaveQueue, memory=memory)

    def _tell(self, hosts: Hosts) -> None:
        names, settings, images = [*dict.fromkeys(hosts.names)], self._settings, self._images
        text = (
            "%s: each rank has up to %d images of its state in host memory, of which up to %d stay, and up to %d "
            "copies of other ranks' images"
        )
        logger.info(text, self._mode, images.own, images.staying, images.copies)
        if settings.mode is RecoveryMode.host and hosts.several:
            text = (
                "%s: the %d ranks are on %d hosts, and a run is restored from memory only if all are on one host; "
                "else from its checkpoints"
            )
            logger.warning(text, self._mode, len(hosts.names), len(names))
        if settings.mode is RecoveryMode.peers and not hosts.several:
            logger.warning("%s: all ranks are on one host, so nobody has copies, and all is as with host", self._mode)
        if not images.copies:
            return
        replicas = min(settings.replicas, len(names) - 1)
        if replicas < settings.replicas:
            text = "checkpoint.recovery.replicas=%d: the job has %d hosts, so each has its copies on %d others"
            logger.warning(text, settings.replicas, len(names), replicas)
        unknown = sorted({*(settings.peers or {}).values()} - {*names})
        if unknown:
            text = "checkpoint.recovery.peers names %s, and no rank is there; the hosts are %s"
            logger.warning(text, ", ".join(unknown), ", ".join(names))
