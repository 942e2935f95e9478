"""The cost of copies at peers by the number of hosts, with one rank on each: what the ranks tell each other.

The ranks, their store and their time are simulated, in one thread. What they run is the product's: how a run with
`checkpoint/recovery=peers` begins, how the ranks agree on a snapshot that peers pull, and that it has arrived,
and how the next run learns where the servers are. Servers are left out, and with them the bytes of the copies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median_low
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from ckpt_component.callers import PersistentCaller
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.scan import Scan
from ckpt_component.core.coordination import Hosts, RankStore, StoreCoordinator
from ckpt_component.core.coordination.connection import StoreConnection
from ckpt_component.core.options import RecoveryMode, ResolvedTimeouts
from ckpt_component.core.outside import Outside
from ckpt_component.events import EventRecorder, SaveReport
from ckpt_component.factory import run_snapshots
from ckpt_component.formats.dcp import DcpWriter
from ckpt_component.hosts import snapshot_source, snapshots
from ckpt_component.hosts.client import ServedRun
from ckpt_component.hosts.snapshot_source import JobClients
from ckpt_component.hosts.snapshots import SnapshotsAtPeers
from ckpt_component.hosts.wire import PeerAddress, memory_root
from ckpt_component.managing.restore import Candidate, Found
from ckpt_component.managing.run_context import RunContext
from ckpt_component.saving.save_queue import SaveQueue
from ckpt_component.testing import Disk, SimulatedFiles
from ckpt_component.testing.simulated_store import SimulatedStore
from ckpt_component.testing.simulation import SimulatedProcess, Simulation

from .counted_connection import CountedConnection, Counts

_ROOT, _TOKEN = "/runs/one", "1f2e3d4c-0a0b0c0d"
_SECONDS = 600.0
_TIMEOUTS = ResolvedTimeouts(stage=_SECONDS, write=_SECONDS, heartbeat=_SECONDS, stall=_SECONDS)
_SETTINGS: Any = SimpleNamespace(
    recovery=SimpleNamespace(
        mode=RecoveryMode.peers, lease=_SECONDS, peers=None, replicas=1, max_bytes_per_second=None, every_steps=1
    ),
    stager={},
)
#: Of a call of the store, which answers about 100,000 in a second: the least, and the most.
_OPERATION_SECONDS = 1e-6, 1e-4
#: In simulated seconds: a look at what has happened, and the end of all.
_POLL, _LIMIT = 0.5, 1e6


def measure_hosts(count: int, saves: int, folder: str) -> Iterator[dict[str, float]]:
    """Costs of `count` hosts, in total.

    Args:
        count: number of hosts
        saves: number of snapshots; the lowest median of them counts
        folder: not used

    Yields:
        Costs by the names of `costs.COSTS`.
    """
    job = _PeerJob(max(count, 2), saves)
    with _simulated(job):
        yield job.costs()


class _PeerJob:
    """A run on so many hosts, which keeps `saves` snapshots, and then looks for them as the next run does."""

    def __init__(self, count: int, saves: int) -> None:
        self.hosts = Hosts(tuple(f"node{number:04d}" for number in range(count)))
        self.saves = saves
        self.simulation = Simulation(1, *_OPERATION_SECONDS)
        self.files = SimulatedFiles(Disk())
        self.store = SimulatedStore(self.simulation.process("agent"))
        self.ranks = [_RankAlone(self, rank) for rank in range(count)]
        #: What had gone over all connections, of rank 0 and of the others, at the end of each part.
        self.counts: list[tuple[Counts, Counts]] = []
        self._ready = 0

    def costs(self) -> dict[str, float]:
        """Run it; returns its costs."""
        for rank in self.ranks:
            rank.process.start(rank.run)
        if not self.simulation.run(_LIMIT):
            raise RuntimeError("The simulated ranks have not come to an end.")
        parts = [
            (leader - earlier[0], others - earlier[1])
            for earlier, (leader, others) in zip(self.counts, self.counts[1:], strict=False)
        ]
        begin, *snapshots, restore = map(_costs_of, parts)
        middle = {name: median_low([each[name] for each in snapshots]) for name in begin}
        return {
            **middle,
            **{f"begin_{name}": value for name, value in begin.items()},
            **{f"restore_{name}": value for name, value in restore.items()},
        }

    def count(self, rank: _RankAlone) -> None:
        """Wait for all ranks; the last one notes what has gone over the connections so far."""
        self._ready += 1
        target = -(-self._ready // len(self.ranks)) * len(self.ranks)
        if self._ready == target:
            leader, *others = (each.connection.counts() for each in self.ranks)
            self.counts.append((leader, sum(others, Counts())))
        while self._ready < target:
            rank.process.outside.sleep(_POLL)


class _RankAlone:
    """One rank, on a host of its own."""

    def __init__(self, job: _PeerJob, rank: int) -> None:
        self._job, self.rank = job, rank
        self.process = job.simulation.process(f"rank {rank}")
        self.connection = CountedConnection(job.store.connect(self.process))

    def run(self) -> None:
        """Begin, keep snapshots, and look for them."""
        job, count = self._job, len(self._job.ranks)
        line = StoreConnection(self.connection, _SECONDS, opens=False, outside=self.process.outside)
        ranks = StoreCoordinator(RankStore(line, self.rank, count, "hosts/"), _SECONDS, _SECONDS)
        events = _CountedArrivals(run=_TOKEN)
        run = RunContext(job.files, _ROOT, MEGATRON, ranks, _TIMEOUTS, events=events, hosts=job.hosts)
        parts = run_snapshots.RunSnapshots(_SETTINGS)
        run = parts.join(run, [_ROOT, []], saves=True)
        job.count(self)
        queue = cast("partial[Any]", parts.queue(SaveQueue, run, PersistentCaller(), DcpWriter(), []))
        stays = cast(SnapshotsAtPeers, queue.keywords["memory"].stays)
        stays.begin(lambda: None)
        job.count(self)
        for number in range(1, job.saves + 1):
            stays.prepare(cast(Any, _NoSnapshotStore()), _SECONDS)
            stays.whole(SaveReport(f"{memory_root(_ROOT, _TOKEN)}/{MEGATRON.folder(number)}", step=number))
            while events.arrived < number:
                self.process.outside.sleep(_POLL)
            job.count(self)
        memory = _FoundMemory(run, [_TOKEN], JobClients(), has_peers=True)
        look = partial(self._look, memory)
        found = Found(**ranks.meet("restore", [memory.offer()], look, self.process.outside.now() + _SECONDS))
        places = found.told[0][-1]
        if len(places) != count:
            raise RuntimeError(f"Of {count} snapshot servers, {len(places)} were found.")
        job.count(self)

    def _look(self, memory: snapshot_source.RunMemory, offers: Sequence[Any]) -> Mapping[str, Any]:
        """What rank 0 tells of a snapshot that the servers have; reading it is left out."""
        memory.look([each for (each,) in offers])
        step, path = self._job.saves, f"{memory_root(_ROOT, _TOKEN)}/{MEGATRON.folder(self._job.saves)}"
        return Found([Candidate(step, path, 0, {"visible": None})], [[]], [], [], [memory.told()])._asdict()


class _FoundMemory(snapshot_source.RunMemory):
    """Has found a snapshot; listing and reading it is left out."""

    def _look(self) -> tuple[RunContext, Scan]:
        return replace(self._run, root=memory_root(_ROOT, _TOKEN)), Scan()


class _CountedArrivals(EventRecorder):
    """Counts the snapshots that are at their peers."""

    arrived = 0

    def at_peers(self, report: SaveReport) -> None:
        """See the base class."""
        self.arrived += 1


class _NoSnapshotStore:
    """In the place of a `MemoryCaller`, and of a server that the next run finds on a host."""

    def __init__(self, rank: Any = 0, outside: Any = None) -> None:
        self.rank = rank

    def prepare(self, timeout: float) -> None:
        """It runs."""

    def listen(self, secret: str, address: str, timeout: float) -> int:
        """The port."""
        return 40_000

    def pull(self, path: str, homes: Sequence[tuple[PeerAddress, float | None]], deadline: float) -> dict[str, Any]:
        """Nothing comes."""
        return {"sent": 0, "seconds": 0.0}

    def progress(self) -> int:
        """Nothing is written."""
        return 0

    def about(self) -> dict[str, Any]:
        """Where it is."""
        address = f"10.100.{self.rank // 250}.{self.rank % 250}"
        port = 30_000 + self.rank * 7919 % 20_000
        place = {"host": f"node{self.rank:04d}", "peer": {"address": address, "port": port}}
        return {"memory": memory_root(_ROOT, _TOKEN), "secret": "0" * 64, **place}

    def close(self) -> None:
        """Nothing is open."""


class _OwnServer:
    """In the place of `HostClients`: the server of the run before that each host has, which is that of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, path: str) -> list[_NoSnapshotStore]:
        return [_NoSnapshotStore(self._rank)]

    def close(self) -> None:
        """Nothing is open."""


def _served_run(token: str, _: Outside) -> ServedRun | None:
    """The run before, which has servers on each host."""
    return ServedRun(memory_root(_ROOT, token), _ROOT) if token == _TOKEN else None


@contextmanager
def _simulated(job: _PeerJob) -> Iterator[None]:
    """Have this process run on simulated time, without servers and without their log."""
    logger = logging.getLogger("ckpt_component")

    def running() -> SimulatedProcess:
        return job.simulation.current.process

    with ExitStack() as until_measured:
        for module, name, value in (
            (run_snapshots, "MemoryCaller", _NoSnapshotStore),
            (snapshots, "offered_address", lambda outside: "10.100.100.100"),
            (snapshot_source, "served_run", _served_run),
            (snapshot_source, "HostClients", lambda **_: _OwnServer(int(running().name.removeprefix("rank ")))),
        ):
            until_measured.enter_context(patch.object(module, name, value))
        until_measured.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        yield


def _costs_of(part: tuple[Counts, Counts]) -> dict[str, float]:
    leader, others = part
    return {
        "messages": float(leader.messages + others.messages),
        "leader_messages": float(leader.messages),
        "looks": float(leader.looks + others.looks),
        "collected_bytes": float(leader.bytes_read),
        "heard_bytes": float(others.bytes_read),
    }
