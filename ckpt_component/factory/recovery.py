"""`SnapshotParts`: what `checkpoint/recovery` adds to the graph. Imported only by runs that keep snapshots."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..background.follower import Follower
from ..callers.memory_caller import MemoryCaller
from ..callers.write_callers import PersistentCaller, WriteCaller
from ..config.hydra.hydra_errors import HydraConfigError
from ..config.image_count import ImageCount
from ..config.schema import Checkpoint
from ..core.commit.fencing import lineage_of
from ..core.coordination import Coordinator, Hosts
from ..core.coordination.addresses import offered_address, reachable
from ..core.options import RecoveryMode
from ..core.outside import OUTSIDE, Outside
from ..core.storage.memory.host_memory import HostMemory
from ..core.storage.memory.job_keepers import JobKeepers
from ..core.storage.memory.keeper_sockets import SocketPlace, memory_root, split_root
from ..core.storage.memory.remote_keeper import HostKeepers, RemoteKeeper
from ..core.storage.storage import Storage
from ..errors import CheckpointConfigError, CheckpointError
from ..events import SaveReport
from ..loading.nearest import NearestReader, PeerReader
from ..managing.peer_memory import PeerMemory
from ..managing.run_context import RunContext
from ..managing.run_memory import RunMemory
from ..saving.at_peers import NewestStays, PeerMap, SnapshotsAtPeers
from ..saving.kept_snapshots import TieredSaveQueue
from ..saving.save_queue import SaveQueue, notify
from ..writers.base import Writer

logger = logging.getLogger(__name__)


class SnapshotParts:
    """What a run that keeps snapshots in memory has beside other runs.

    Args:
        settings: the config
        outside: what the run runs in

    Attributes:
        earlier: the keepers of the run before; set by `begin`
    """

    def __init__(self, settings: Checkpoint, outside: Outside = OUTSIDE) -> None:
        self._settings, self._outside = settings.recovery, outside
        self._arenas = settings.stager.get("arenas", 1)
        self._images = ImageCount.of(self._settings, self._arenas, hosts=1)
        self._keepers = JobKeepers(outside)
        self._memory = HostMemory(self._keepers, outside=outside)
        self._followers: Sequence[Follower] = ()
        #: Whether other hosts have copies; set by `begin`.
        self._has_peers = False
        self.earlier: RunMemory | None = None

    @property
    def mode(self) -> str:
        """`checkpoint/recovery=...`, for texts."""
        return f"checkpoint/recovery={self._settings.mode}"

    @property
    def reader(self) -> Callable[..., NearestReader]:
        """What makes the reader, given the arguments of `Reader`."""
        if self._settings.mode is RecoveryMode.peers:
            return partial(PeerReader, keepers=self._keepers)
        return NearestReader

    def with_memory(self, storage_of: Callable[[str], Storage]) -> Callable[[str], Storage]:
        """The storage of a path, which may be in the memory of this host's keepers; there, to read only."""
        memory = self._memory
        return lambda path: memory if memory.holds(path) else storage_of(path)

    def lineage(self, storage: Storage, root: str) -> Sequence[str]:
        """On the leading rank: tokens of the runs that have owned the folder so far, the last one first."""
        try:
            return lineage_of(storage, root)
        except (CheckpointError, OSError) as error:
            logger.warning("the runs before this one, which may have snapshots in memory, are unknown: %s", error)
            return ()

    def begin(
        self,
        run: RunContext,
        followers: Sequence[Follower] = (),
        *,
        named: str | None = None,
        lineage: Sequence[str] = (),
    ) -> RunContext:
        """The run with its memory, where this rank's keeper takes what is put.

        Args:
            run: the run
            followers: hear what is whole there
            named: the run's folder as the leading rank spells it; None: as `run` has it
            lineage: what `lineage` has returned there
        """
        self._followers = followers
        root, rank = memory_root(named or run.root, run.events.run), run.ranks.rank
        place = split_root(root)
        if place is None:
            raise ValueError(f"{root} is no root in memory")
        outside = self._outside
        own = RemoteKeeper(SocketPlace(*place, outside), rank, now=False)  # its process starts later
        self._has_peers = self._settings.mode is RecoveryMode.peers and run.hosts.several
        self._images = ImageCount.of(self._settings, self._arenas, len(set(run.hosts.names)))
        self.earlier = PeerMemory(run, lineage, self._keepers) if self._has_peers else RunMemory(run, lineage)
        memory = HostMemory(HostKeepers(besides=rank, outside=outside), own, outside)
        return replace(run, memory=replace(run, fs=memory, root=root, remote=None))

    def room(self) -> dict[str, Any]:
        """Arguments for `Stager.connect`: a snapshot need not wait for one that is still being written, or sent."""
        return {"kept": self._images.staying, "in_flight": self._images.in_flight}

    def queue(
        self, caller: WriteCaller, writer: Writer, ranks: Coordinator, run: RunContext
    ) -> Callable[..., SaveQueue]:
        """Have the writer process keep snapshots. Returns the `queue` of the pipeline."""
        memory, earlier = run.memory, self.earlier
        if memory is None or earlier is None:
            return SaveQueue
        if not isinstance(caller, PersistentCaller):
            raise HydraConfigError(
                f"{self.mode} keeps snapshots in the persistent writer process, and "
                f"{type(caller).__name__} has none; use checkpoint/caller=persistent."
            )
        if ranks.is_leader:
            self._tell(run.hosts)
        here, lease = run.fs.here(run.root), self._settings.lease
        connect = caller.keep_snapshots(here, memory.root, ranks.rank, ranks.world_size, lease)
        stays, on_kept = NewestStays(), earlier.end_others
        followers = [follower.on_kept for follower in self._followers]
        if self._has_peers:
            # What the run before has at its peers is needed until this one has something there.
            ends = earlier.end_others if run.hosts.leads(ranks.rank) else _nothing
            peers, on_kept = self._peers(run), _nothing
            stays = SnapshotsAtPeers(peers, MemoryCaller(connect, ranks.outside), ranks, run.timeouts, run.events, ends)
        return partial(
            TieredSaveQueue,
            caller=MemoryCaller(connect, ranks.outside),
            writer=writer,
            memory=memory.fs,
            path_of=lambda path: memory.path_of(run.step_of(path)),
            on_kept=partial(_tell_all, [lambda _: on_kept(), *followers]),
            stays=stays,
        )

    def _peers(self, run: RunContext) -> PeerMap:
        """Agree on who has copies for whom."""
        ranks, hosts, settings = run.ranks, run.hosts, self._settings
        given = settings.peers or {}
        deadline = ranks.outside.now() + run.timeouts.stage
        begun = ranks.scatter("peers/begin", offered_address(ranks.outside), partial(_begin, ranks.outside), deadline)
        return PeerMap(
            of=[hosts.peer_ranks(rank, given, settings.replicas) for rank in range(ranks.world_size)],
            unseen=hosts.elsewhere(ranks.rank),
            address=begun["address"],
            secret=begun["secret"],
            bytes_per_second=settings.max_bytes_per_second,
        )

    def _tell(self, hosts: Hosts) -> None:
        if self._has_peers:
            self._tell_of_peers(hosts)
            return
        text = "%s: each rank has up to %d images of its state in host memory, one of which stays"
        logger.info(text, self.mode, self._images.own)
        if self._settings.mode is RecoveryMode.peers:
            text = "checkpoint/recovery=peers: all ranks are on one host, so nobody has copies, and all is as with host"
            logger.warning(text)
        elif hosts.several:
            logger.warning(
                "checkpoint/recovery=host: the %d ranks are on %d hosts, and a run is restored from memory only if all "
                "are on one host; else from its checkpoints",
                len(hosts.names),
                len(set(hosts.names)),
            )

    def _tell_of_peers(self, hosts: Hosts) -> None:
        names, settings = [*dict.fromkeys(hosts.names)], self._settings
        replicas = min(settings.replicas, len(names) - 1)
        text = (
            "checkpoint/recovery=peers: each rank has up to %d images of its state in host memory, of which up to "
            "three stay, and up to %d copies of other ranks' images"
        )
        logger.info(text, self._images.own, self._images.copies)
        if replicas < settings.replicas:
            text = "checkpoint.recovery.replicas=%d: the job has %d hosts, so each has its copies on %d others"
            logger.warning(text, settings.replicas, len(names), replicas)
        unknown = sorted({*(settings.peers or {}).values()} - {*names})
        if unknown:
            text = "checkpoint.recovery.peers names %s, and no rank is there; the hosts are %s"
            logger.warning(text, ", ".join(unknown), ", ".join(names))


def _begin(outside: Outside, addresses: Sequence[str]) -> list[Any]:
    """On the leading rank: what the keeper of each rank needs so that others know it."""
    if "" in addresses:
        raise CheckpointConfigError(
            f"checkpoint/recovery=peers: rank {addresses.index('')} does not find the address of its host (see its "
            "log); set MASTER_ADDR to a name that all hosts know, or use checkpoint/recovery=host."
        )
    secret = outside.random_bytes(32).hex()
    return [{"secret": secret, "address": address} for address in reachable(addresses, outside)]


def _tell_all(hooks: Sequence[Callable[[SaveReport], None]], report: SaveReport) -> None:
    """Call each hook, whatever becomes of the others."""
    for hook in hooks:
        notify(hook, report)


def _nothing() -> None:
    """Nothing follows."""
