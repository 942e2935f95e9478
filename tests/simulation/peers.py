"""A run on several hosts that keeps its snapshots in their memory, with copies at peers: the product's own parts.

What runs is what `factory/recovery` puts together. Simulated are the hosts, the network between them, gloo, the disk
that all hosts see, time and threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import simulation.recovery as one_host
from simulation.gloo import SimulatedGloo
from simulation.keepers import LEASE, Host, HostKeeper, HostPatches, KeeperProcess, ReachedKeeper
from simulation.rank_states import RankStagers, blank
from simulation.recovery import (
    ROOT,
    TIMEOUTS,
    DurableCaller,
    LabelledStore,
    Life,
    Loader,
    TrainerMemory,
    newest,
    wrong_in,
)
from simulation.waits import waits_for_the_dead

import ckpt_component.core.writing.keeper as keeper_module
import ckpt_component.managing.peer_memory as peer_memory
from ckpt_component import CheckpointError
from ckpt_component.callers.write_callers import PersistentCaller
from ckpt_component.core.commit.names import MEGATRON, owned_token
from ckpt_component.core.commit.retention import RetentionPolicy
from ckpt_component.core.coordination import Hosts, RankStore, StoreCoordinator
from ckpt_component.core.coordination.connection import StoreConnection
from ckpt_component.core.options import Prove, RecoveryMode, Verify
from ckpt_component.core.storage.memory import job_keepers
from ckpt_component.core.storage.memory.keeper_sockets import SCHEME, SocketPlace
from ckpt_component.core.storage.memory.keepers import Keeper
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.core.writing.copy_taker import CopyTaker
from ckpt_component.core.writing.request import WriteRequest
from ckpt_component.events import EventRecorder, SaveReport
from ckpt_component.factory import recovery
from ckpt_component.factory.recovery import SnapshotParts
from ckpt_component.loading.collective import CollectiveLoad
from ckpt_component.loading.read_once import ReadOnce
from ckpt_component.managing.policies import ResumePolicy
from ckpt_component.managing.restore import Restorer
from ckpt_component.managing.run_context import RunContext
from ckpt_component.managing.run_folder import RunFolder
from ckpt_component.saving.attempts import SaveAttempts
from ckpt_component.saving.context import NoRun, SaveContext
from ckpt_component.stagers.base import Snapshot
from ckpt_component.testing.process_files import ProcessFiles
from ckpt_component.testing.simulated_network import SimulatedNetwork
from ckpt_component.testing.simulation import SimulatedProcess

PHASES = ("keep", "commit", "replicate", "find", "verify", "copy")
#: Which host each rank is on: where two things happen, and where each of them happens alone.
LAYOUTS = (("a", "b"), ("a", "a", "b"), ("a", "b", "c"))
WORLDS = (*LAYOUTS, ("a",), ("a", "b", "b", "a"), ("a", "b", "c", "d"))
_SETTINGS: Any = SimpleNamespace(
    recovery=SimpleNamespace(
        mode=RecoveryMode.peers, lease=LEASE, peers=None, replicas=1, max_bytes_per_second=None, every_steps=1
    ),
    stager={"arenas": 1},
)


class Cluster:
    """Hosts, and the network between them. In the place of one `Host`."""

    belongs_to_another = False

    def __init__(self, life: PeerLife) -> None:
        self.life = life
        self.network = life.simulation.network
        self.network.operation = lambda sock: life.on_network(cast(Any, sock.process), cast(Any, sock.client))
        self.gloo = SimulatedGloo(life.simulation, self.members_of, life.on_network)
        life.simulation.distributed = lambda process: self.gloo
        self.hosts = dict[str, Host]()
        self.full_until = dict[str, float]()

    @property
    def in_simulation(self) -> bool:
        return all(host.in_simulation for host in self.hosts.values())

    def host(self, name: str) -> Host:
        if name not in self.hosts:
            self.hosts[name] = ClusterHost(self, name)
        return self.hosts[name]

    def host_of(self, process: SimulatedProcess) -> Host:
        return self.host(process.host)

    def members_of(self, process: SimulatedProcess) -> list[SimulatedProcess]:
        return next(job.processes for job in reversed(self.life.jobs) if process in job.processes)

    @property
    def tokens(self) -> list[str]:
        return [*dict.fromkeys(token for host in self.hosts.values() for token in host.tokens)]

    def living(self) -> list[HostKeeper]:
        return [keeper for host in self.hosts.values() for keeper in host.living()]

    @property
    def keepers(self) -> list[HostKeeper]:
        """All that there were."""
        return [keeper for host in self.hosts.values() for keeper in host.keepers]

    def available(self, name: str) -> int:
        return 0 if self.life.simulation.now < self.full_until.get(name, 0.0) else 1 << 40

    def clear(self, arenas: set[int]) -> None:
        for host in self.hosts.values():
            host.clear(arenas)


class ClusterHost(Host):
    """One of several hosts."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster.life.simulation, cluster.life.operation)
        self.cluster, self.name = cluster, name

    def at(self, process: SimulatedProcess) -> None:
        """A process is on this host."""
        process.host = self.name


class ClusterPatches(HostPatches):
    """While it is entered, the product's modules have the simulated parts of the cluster that is set."""

    cluster: Cluster

    def use_cluster(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def _set(self) -> Host:
        for host in self.cluster.hosts.values():
            if host.making is not None:
                return host
        return self.cluster.host_of(self.cluster.life.simulation.current.process)

    def __enter__(self) -> ClusterPatches:
        super().__enter__()
        patch = self._patch
        patch.setattr(keeper_module, "CopyTaker", self._taker)
        patch.setattr(peer_memory, "keepers_of", lambda path, outside: self._set().keepers_at(path))
        patch.setattr(job_keepers, "HostKeepers", lambda outside: Here(self))
        patch.setattr(recovery, "HostKeepers", lambda besides, outside: self._besides(besides))
        patch.setattr(recovery, "RemoteKeeper", lambda place, rank, now: OwnKeeper(self._set(), self._running()))
        patch.setattr(recovery, "HostMemory", lambda find, own=None, outside=None: PeerTrainerMemory(self, find, own))
        offered = lambda outside: self.network.address_of(outside.host_name())  # noqa: E731
        patch.setattr(recovery, "offered_address", offered)
        return self

    @property
    def network(self) -> SimulatedNetwork:
        return self.cluster.network

    def _taker(self, files: Any, root: str, name: str, home: Any, free_memory: Any, outside: Any) -> Any:
        available = partial(self.cluster.available, outside.host_name())
        return CopyTaker(files, root, name, home, available, outside)

    def _besides(self, rank: int) -> Callable[[str], list[Keeper]]:
        host, process = self._set(), self._running()
        return lambda path: [each for each in host.find(process)(path) if cast(ReachedKeeper, each).rank != rank]


class Current:
    """Stands for a module: what the cluster that is set has in its place, and its constants."""

    def __init__(self, of: Callable[[], Any], module: Any) -> None:
        self._of, self._module = of, module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module if name.isupper() else self._of(), name)


class Here:
    """In the place of `HostKeepers` of `JobKeepers`."""

    def __init__(self, patches: ClusterPatches) -> None:
        self._patches = patches

    def at(self, place: SocketPlace) -> list[Keeper]:
        host = self._patches._set()
        keepers = sorted(host.living(), key=lambda keeper: keeper.rank)
        process = host.simulation.current.process
        return [ReachedKeeper(each, process) for each in keepers if each.place == (place.root, place.token)]


class OwnKeeper(ReachedKeeper):
    """The keeper of a trainer, which may be started again."""

    def __init__(self, host: Host, process: SimulatedProcess) -> None:
        self._host, self._process = host, process

    @property
    def keeper(self) -> HostKeeper:  # type: ignore[override]
        own = [each for each in self._host.keepers if each.trainer is self._process]
        if not own:
            raise ConnectionRefusedError("it is not started yet")
        return own[-1]


class PeerTrainerMemory(TrainerMemory):
    """The memory of keepers as a trainer sees it."""

    def __init__(self, patches: ClusterPatches, find: Any, own: Keeper | None) -> None:
        process, life = patches._running(), patches.cluster.life
        super(TrainerMemory, self).__init__(find, own, process.outside)
        self._life, self._process = life, process


class AtOnce:
    """In the place of a `ThreadPoolExecutor`: who gives it a task does that itself."""

    def __init__(self, count: int, thread_name_prefix: str) -> None:
        pass

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done = Future[Any]()
        try:
            done.set_result(task(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done


class KeepingCaller(PersistentCaller):
    """Writes files at once, in one operation; and has a keeper."""

    def __init__(self, host: Host, process: SimulatedProcess, durable: DurableCaller) -> None:
        self._host, self._trainer, self._durable = host, process, durable

    def keep_snapshots(self, folder: str, root: str, rank: int, world_size: int, lease: float) -> Any:
        def connect(timeout: float) -> KeeperProcess:
            return self._host.keeper_of(self._trainer, root, rank, world_size)

        return connect

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        return self._durable.run(request, deadline)

    def progress(self) -> int:
        return 0

    def settle(self) -> None:
        """It has written."""


class PhasedOnce(ReadOnce):
    """Loads whose phases are those of a life."""

    def __init__(self, life: PeerLife, process: SimulatedProcess, ranks: StoreCoordinator) -> None:
        super().__init__(ranks, TIMEOUTS)
        self._life, self._process = life, process

    def load(self, about: str, tag: str | None = None, name: str = "load") -> CollectiveLoad:
        load = super().load(about, tag, name)
        inner, life, process = load.phase, self._life, self._process

        def phase(name: str) -> Any:
            life.phase_of[process] = {"open": "verify", "read": "copy"}.get(name, "find")
            return inner(name)

        load.phase = phase  # type: ignore[method-assign]
        return load


class TellingEvents(EventRecorder):
    """Tells a life what is at its peers."""

    def __init__(self, job: PeerJob, rank: int) -> None:
        super().__init__(rank=rank, world_size=len(job.hosts), run=job.token)
        self._job = job

    def at_peers(self, report: SaveReport) -> None:
        self._job.life.has_peers(self._job, report.step or 0)


@dataclass
class Claim:
    """A snapshot that was acknowledged, and which hosts of its job were lost since."""

    job: int
    step: int
    hosts: Sequence[str]
    lost: set[str] = field(default_factory=set)

    @property
    def all_there(self) -> bool:
        return not self.lost

    @property
    def at_peers(self) -> bool:
        hosts = Hosts(tuple(self.hosts))
        return not any({host, *hosts.peers_of(host, {}, 1)} <= self.lost for host in self.hosts)


@dataclass
class Resumed:
    """What a rank got from its restore, and the least step that it must have got."""

    job: int
    rank: int
    step: int | None
    state: Mapping[str, Any] | None
    error: Exception | None
    least: int


class PeerJob(one_host.Job):
    """A run of the trainers on several hosts; what it saves is as that of `Job`."""

    life: PeerLife

    def __init__(self, life: PeerLife, number: int, count: int) -> None:
        self.life, self.number, self.count = life, number, count
        self.token = new_token_in(life)
        self.hosts = (*life.hosts,)
        self.processes = [life.simulation.process(f"trainer {rank} of job {number}") for rank in range(len(self.hosts))]
        for process, name in zip(self.processes, self.hosts, strict=True):
            life.cluster.host(name).at(process)
        self.agent = life.simulation.process("agent")
        self.store = LabelledStore(self.agent)
        self.store.life = life
        self.done = list[int]()
        self.began = life.simulation.now
        self.claims = life.claimed()

    def _run(self, rank: int, process: SimulatedProcess) -> None:
        life, outside, plain = self.life, process.outside, ProcessFiles(process, self.life.files)
        life.phase_of[process] = "find"
        connection = StoreConnection(self.store.connect(process), TIMEOUTS.heartbeat, opens=False, outside=outside)
        store = RankStore(connection, rank, len(self.hosts), f"{self.number}/")
        ranks = StoreCoordinator(store, TIMEOUTS.heartbeat, TIMEOUTS.stall)
        parts = SnapshotParts(_SETTINGS, outside)
        storage_of = parts.with_memory(lambda path: plain)
        events = TellingEvents(self, rank)
        run = parts.begin(
            RunContext(
                plain,
                ROOT,
                MEGATRON,
                ranks,
                TIMEOUTS,
                events=events,
                elsewhere=storage_of,
                hosts=Hosts(self.hosts),
            ),
            lineage=life.cluster.tokens,
        )
        folder = RunFolder(run, ResumePolicy(), RetentionPolicy(last=None), takeover=True)
        reader = parts.reader(
            rank,
            len(self.hosts),
            Verify.on_resume,
            shared=False,
            storage_of=storage_of,
            prove=Prove.off,
            collective=PhasedOnce(life, process, ranks),
        )
        restorer = Restorer(Loader(ranks, events, reader), folder, True, parts.earlier)
        state = blank(len(self.hosts))
        try:
            step = life.waiting(self, rank, lambda: restorer.load(state, True, False))
        except CheckpointError as error:
            life.resumed_at_peers.append(Resumed(self.number, rank, None, None, error, 0))
            raise
        life.came_back(self, Resumed(self.number, rank, step, state, None, life.least(self)))
        life.phase_of[process] = "commit"
        hooks = NoRun(storage_of)
        if ranks.is_leader:
            hooks.ownership = folder.ownership  # type: ignore[assignment]
        context = SaveContext(ranks, storage_of, TIMEOUTS, hooks, events=events)
        caller = KeepingCaller(life.cluster.host_of(process), process, DurableCaller(process, life.files))
        queue = parts.queue(caller, life.stagers.writer, ranks, run)(
            SaveAttempts(caller, life.stagers.writer, context),
            context,
            in_background=True,
            add_report=partial(self._acknowledge),
        )
        assert run.memory is not None
        own_token = folder.ownership.token
        for number in range(1, self.count + 1):
            at = (step or 0) + number
            outside.sleep(1.0)
            ranks.at_step(at)
            process.turn()
            snapshot = life.take(rank, self.number, at)
            process.turn()
            name = MEGATRON.folder(at)
            token, owner = ranks.meet(
                "save", name, lambda _: [owned_token(new_token(outside)), own_token], outside.now() + 60.0
            )
            place = run.memory if at % 2 else run
            handle = queue.submit(self._staged(place.fs, place.path_of(at), at, snapshot, token, owner)[0])
            while not handle.done():
                outside.sleep(0.1)
            failure = handle.exception()
            if failure is not None:
                life.errors.append(f"job {self.number} rank {rank}: {failure}")
                if place is run:
                    raise failure
        # What is being sent may arrive, if it is not slow.
        for _ in range(20):
            if any((claim.job, claim.step) == (self.number, at) for claim in life.peer_claims):
                break
            outside.sleep(0.1)

    def _acknowledge(self, report: SaveReport) -> None:
        if report.outcome == "committed":
            self.life.was_saved(self, report.step or 0, in_memory=report.path.startswith(SCHEME))


def new_token_in(life: PeerLife) -> str:
    """A token of a run, which the seed decides."""
    return f"{life.simulation.random.randrange(1 << 32):08x}-{life.simulation.random.randrange(1 << 32):08x}"


class PeerLife(Life):
    """One life of a run on several hosts."""

    cluster: Cluster
    jobs: list[PeerJob]  # type: ignore[assignment]

    def __init__(
        self, patches: ClusterPatches, stagers: RankStagers, layout: Sequence[str], troubles: Sequence[Any] = ()
    ) -> None:
        self._patches = patches
        self.hosts = [*layout]
        #: From when until when else a process may wait: what was sent over a slow link comes at last.
        self.excused = list[tuple[float, float]]()
        self.resumed_at_peers = list[Resumed]()
        self.memory_claims = list[Claim]()
        self.peer_claims = list[Claim]()
        #: When keepers were lost, and of which host.
        self.losses = list[tuple[float, str]]()
        #: When the first rank took the snapshot of a step of a job.
        self.taken_at = dict[tuple[int, int], float]()
        super().__init__(patches, stagers, troubles)

    def make_host(self, patches: HostPatches) -> Host:
        self.cluster = Cluster(self)
        self._patches.use_cluster(self.cluster)
        return cast(Host, self.cluster)

    @property
    def is_refused(self) -> bool:
        """Whether no job may begin."""
        return False

    def new_job(self, number: int, count: int) -> PeerJob:
        return PeerJob(self, number, count)

    def pause_after(self, number: int) -> float:
        """Longer and longer, as links heal."""
        return min(4.0 ** (number - 1), 40.0)

    def operation(self, process: SimulatedProcess, what: str) -> None:
        if process is self._launcher:
            return
        if process not in self.phase_of and what != "keep":
            return
        super().operation(process, what)

    def phase(self, process: SimulatedProcess, what: str) -> str:
        return what if what in ("keep", "replicate") else self.phase_of.get(process, "find")

    def on_network(self, process: SimulatedProcess, client: SimulatedProcess) -> None:
        """An operation on a connection: a keeper's sends copies, a trainer's reads them."""
        if client in self.phase_of:
            super().operation(client, "")
        else:
            super().operation(process, "replicate")

    def excuses(self) -> Iterator[tuple[float, float]]:
        yield from super().excuses()
        yield from self.excused

    # What was acknowledged

    def claimed(self) -> tuple[int, int, int]:
        """The newest steps that are in memory if all hosts are there; at peers, whatever was lost; and in the folder."""
        in_memory = max((each.step for each in self.memory_claims if each.all_there), default=0)
        at_peers = max((each.step for each in self.peer_claims if each.at_peers), default=0)
        return in_memory, at_peers, newest(self.durable)

    def was_saved(self, job: PeerJob, step: int, *, in_memory: bool) -> None:
        if in_memory:
            self.memory_claims.append(self._claim(job, step))
        self.acknowledged(job.number, step, in_memory=in_memory)

    def has_peers(self, job: PeerJob, step: int) -> None:
        if not any((each.job, each.step) == (job.number, step) for each in self.peer_claims):
            self.peer_claims = [each for each in self.peer_claims if each.job == job.number]
            self.peer_claims.append(self._claim(job, step))

    def _claim(self, job: PeerJob, step: int) -> Claim:
        """What was lost since the snapshot was taken may have been lost with it."""
        taken = self.taken_at[job.number, step]
        return Claim(job.number, step, job.hosts, {host for when, host in self.losses if when >= taken} & {*job.hosts})

    def take(self, rank: int, job: int, step: int) -> Snapshot:
        self.taken_at.setdefault((job, step), self.simulation.now)
        return super().take(rank, job, step)

    def lose(self, host: str) -> None:
        """What the keepers of a host had is gone."""
        self.losses.append((self.simulation.now, host))
        for claim in (*self.memory_claims, *self.peer_claims):
            claim.lost |= {host} & {*claim.hosts}

    def least(self, job: PeerJob) -> int:
        """The least step that a job must begin with."""
        in_memory, at_peers, durable = map(min, job.claims, self.claimed())
        unwell = any(start <= self.simulation.now and end >= job.began for start, end in self.unwell)
        unwell |= any(when >= job.began for when in (*self.cluster.network.flipped, *dict(self.losses)))
        return durable if unwell else max(in_memory, at_peers, durable)

    def came_back(self, job: PeerJob, resumed: Resumed) -> None:
        self.resumed_at_peers.append(resumed)
        step = resumed.step or 0
        self.memory_claims = [each for each in self.memory_claims if each.step <= step or each.job == job.number]
        self.peer_claims = [each for each in self.peer_claims if each.step <= step or each.job == job.number]


def violations(life: PeerLife, *, ended: bool) -> list[str]:
    """What must never be, and is."""
    wrong = [] if ended else ["a call hangs"]
    if ended and not life.is_in_peace and not life.is_refused:
        wrong.append(f"no job came to its end: {life.errors}")
    resumed = life.resumed_at_peers
    for job in sorted({each.job for each in resumed}):
        there = [each for each in resumed if each.job == job and each.error is None]
        if len({each.step for each in there}) > 1:
            wrong.append(f"job {job} begins at other steps on other ranks: {[each.step for each in there]}")
        for each in there:
            told = f"rank {each.rank} of job {job} at step {each.step}"
            if (each.step or 0) < each.least:
                wrong.append(f"{told}, and step {each.least} was acknowledged; {life.happened}; {life.errors}")
            assert each.state is not None
            wrong += [f"{told}: {text}" for text in wrong_in(life, each.step, each.state)]
    return [*wrong, *waits_for_the_dead(life)]
