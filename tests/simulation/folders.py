"""A run whose hosts have local folders of their own in front of a folder that all see: the product's own parts.

What runs is what `build_manager` puts together for `checkpoint.local.dir`. Simulated are the hosts with their disks, the
network between them, gloo, the disk that all hosts see, time and threads.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from simulation.peers import AtOnce, Claim, ClusterPatches, PeerJob, PeerLife, PhasedOnce, Resumed, violations
from simulation.rank_states import RankStagers, blank
from simulation.recovery import ROOT, TIMEOUTS, DurableCaller, Loader

from ckpt_component import CheckpointCorruptError, CheckpointError, CheckpointSaveError
from ckpt_component.callers.write_callers import WriteCaller
from ckpt_component.core.commit.host_parts import hosts_of
from ckpt_component.core.commit.manifest import MAX_BYTES, decode_manifest
from ckpt_component.core.commit.manifest_commit import attempts_in, is_quarantined
from ckpt_component.core.commit.names import MEGATRON, QUARANTINED, owned_token
from ckpt_component.core.commit.protocols import attempt_here
from ckpt_component.core.commit.retention import RetentionPolicy
from ckpt_component.core.coordination import Hosts, RankStore, StoreCoordinator
from ckpt_component.core.coordination.connection import StoreConnection
from ckpt_component.core.options import Prove, Verify
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.core.storage.storage import Storage
from ckpt_component.core.writing.request import WriteRequest
from ckpt_component.core.writing.write_job import run_write_job
from ckpt_component.events import EventRecorder, SaveReport
from ckpt_component.loading.reader import Reader
from ckpt_component.managing import host_tier
from ckpt_component.managing.host_tier import HostTier
from ckpt_component.managing.policies import ResumePolicy
from ckpt_component.managing.restore import Restorer
from ckpt_component.managing.run_context import RunContext
from ckpt_component.managing.run_folder import RunFolder
from ckpt_component.saving.attempts import SaveAttempts
from ckpt_component.saving.context import NoRun, SaveContext
from ckpt_component.saving.save_queue import SaveQueue
from ckpt_component.testing import Disk, SimulatedFiles
from ckpt_component.testing.process_files import ProcessFiles
from ckpt_component.testing.simulation import SimulatedProcess

PHASES = ("begin", "commit", "find", "agree", "verify", "copy")
#: Steps that each local folder keeps.
KEPT = 2


def local_root(host: str) -> str:
    """`checkpoint.local.dir` on a host."""
    return f"/scratch/{host}/run"


def is_durable(step: int) -> bool:
    """Whether a step also goes to the folder that all hosts see."""
    return step % 2 == 1


class FolderPatches(ClusterPatches):
    """While it is entered, the product's modules have the simulated parts of the cluster that is set."""

    def __enter__(self) -> FolderPatches:
        super().__enter__()
        patch = self._patch
        offered = lambda outside: self.network.address_of(self._name())  # noqa: E731
        patch.setattr(host_tier, "offered_address", offered)
        return self

    def _name(self) -> str:
        return self.cluster.life.simulation.current.process.host


class InTurn(AtOnce):
    """In the place of a `ThreadPoolExecutor`: does one after the other."""

    def map(self, function: Callable[[Any], Any], items: Any) -> Iterator[Any]:
        return iter([function(item) for item in items])

    def shutdown(self) -> None:
        """Nothing is left."""


class HostDisk(ProcessFiles):
    """The files of a disk as a process sees them. What it does with them are operations of a life."""

    def __init__(self, life: FolderLife, process: SimulatedProcess, files: SimulatedFiles) -> None:
        super().__init__(process, files)
        self._life = life

    @contextmanager
    def at_disk(self) -> Iterator[Disk]:
        self._life.operation(self.process, "")
        with super().at_disk() as disk:
            yield disk


class PartCaller(WriteCaller):
    """Writes the files of a rank to the disk of its host."""

    in_other_process = False

    def __init__(self, disk: HostDisk) -> None:
        self._disk = disk

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        attempt = attempt_here(self._disk, request.attempt.to_plain())
        try:
            return run_write_job(replace(request, fs=self._disk, attempt=attempt))
        except OSError as error:
            raise CheckpointSaveError(f"{attempt.target}: {error}", error.errno) from error

    def progress(self) -> int:
        return 0


class FolderJob(PeerJob):
    """A run on several hosts, each with a folder; of what it saves there, some also goes to the folder that all see."""

    life: FolderLife

    def _run(self, rank: int, process: SimulatedProcess) -> None:
        life, outside = self.life, process.outside
        life.phase_of[process] = "begin"
        connection = StoreConnection(self.store.connect(process), TIMEOUTS.heartbeat, opens=False, outside=outside)
        store = RankStore(connection, rank, len(self.hosts), f"{self.number}/")
        ranks = StoreCoordinator(store, TIMEOUTS.heartbeat, TIMEOUTS.stall)
        state, step = blank(len(self.hosts)), None

        def begin() -> tuple[HostTier, RunContext, RunFolder, int | None]:
            tier, run, folder = self._begin(rank, process, ranks)
            return tier, run, folder, self._restore(rank, process, run, folder, state)

        try:
            tier, run, folder, step = life.waiting(self, rank, begin)
        except CheckpointError as error:
            life.resumed_at_peers.append(Resumed(self.number, rank, None, None, error, 0))
            raise
        life.came_back(self, Resumed(self.number, rank, step, state, None, life.least(self)))
        life.phase_of[process] = "commit"
        self._save(rank, process, run, folder, tier, step or 0)
        folder.close()
        tier.close()

    def _begin(
        self, rank: int, process: SimulatedProcess, ranks: StoreCoordinator
    ) -> tuple[HostTier, RunContext, RunFolder]:
        """As `build_manager` does."""
        life, host, hosts = self.life, self.hosts[rank], Hosts(self.hosts)
        shared = HostDisk(life, process, life.files)
        disk = HostDisk(life, process, life.disk_of(host))
        events = EventRecorder(rank=rank, world_size=len(self.hosts), run=self.token)
        remote = RunContext(
            shared, ROOT, MEGATRON, ranks, TIMEOUTS, events=events, elsewhere=lambda path: shared, hosts=hosts
        )
        tier = HostTier(disk, local_root(host), ranks, hosts, TIMEOUTS)
        tier.begin(saves=True)
        storage = tier.storage

        def storage_of(path: str) -> Storage:
            return storage if path.startswith(tier.root) else shared

        run = replace(remote, fs=storage, root=tier.root, remote=remote, elsewhere=storage_of)
        folder = RunFolder(run, ResumePolicy(), RetentionPolicy(last=KEPT), takeover=True)
        folder.check_writable()
        return tier, run, folder

    def _restore(
        self, rank: int, process: SimulatedProcess, run: RunContext, folder: RunFolder, state: dict[str, Any]
    ) -> int | None:
        life, ranks = self.life, cast(StoreCoordinator, run.ranks)
        life.phase_of[process] = "find"
        reader = Reader(
            rank,
            len(self.hosts),
            Verify.on_resume,
            shared=False,
            storage_of=run.elsewhere,
            prove=Prove.off,
            collective=PhasedOnce(life, process, ranks),
        )
        restorer = Restorer(Loader(ranks, run.events, reader), folder, True)
        step = restorer.load(state, True, False)
        if ranks.is_leader and step is not None:
            restorer.delete_old(step)
        return step

    def _save(
        self, rank: int, process: SimulatedProcess, run: RunContext, folder: RunFolder, tier: HostTier, step: int
    ) -> None:
        life, outside, ranks, writer = self.life, process.outside, run.ranks, self.life.stagers.writer
        assert run.remote is not None
        place, farther = run.fs, run.remote.fs
        context = SaveContext(ranks, lambda _: place, TIMEOUTS, folder, events=run.events, unseen=tier.unseen)
        caller = PartCaller(HostDisk(life, process, life.disk_of(self.hosts[rank])))
        queue = SaveQueue(
            SaveAttempts(caller, writer, context), context, in_background=True, add_report=self._acknowledge
        )
        remote = SaveContext(ranks, lambda _: farther, TIMEOUTS, NoRun(run.elsewhere), queue="durable/")
        durable = SaveAttempts(DurableCaller(process, life.files), writer, remote)
        for number in range(1, self.count + 1):
            at = step + number
            outside.sleep(1.0)
            ranks.at_step(at)
            process.turn()
            snapshot = life.take(rank, self.number, at)
            process.turn()
            path, until = run.path_of(at), outside.now() + 60.0
            token = ranks.meet("save", path, lambda _: self._admitted(folder, path), until)  # noqa: B023
            handle = queue.submit(self._staged(place, path, at, snapshot, token, folder.ownership.token)[0])
            while not handle.done():
                outside.sleep(0.1)
            failure = handle.exception()
            if failure is not None:
                raise failure
            if is_durable(at):
                copied = life.take(rank, self.number, at)
                durable.run(*self._staged(farther, run.remote.path_of(at), at, copied, token), 1)
                copied.release()
                life.acknowledged(self.number, at, in_memory=False)

    @staticmethod
    def _admitted(folder: RunFolder, path: str) -> str:
        """As admission does on the leading rank."""
        try:
            folder.check_path(path)
        except CheckpointError:
            raise
        except OSError as error:
            text = f"{path} was not saved: could not find out whether the path is free: {error}"
            raise CheckpointSaveError(text, error.errno) from error
        return owned_token(new_token(folder.run.fs.outside))

    def _acknowledge(self, report: SaveReport) -> None:
        if report.outcome == "committed":
            self.life.was_saved(self, report.step or 0, in_memory=True)


class FolderLife(PeerLife):
    """One life of a run whose hosts have local folders."""

    jobs: list[FolderJob]  # type: ignore[assignment]
    most_jobs = 8  # a link that is cut while jobs begin takes four of them
    patience = 16.0  # the start takes up to eight of them: it looks at many files on all hosts

    def __init__(
        self, patches: FolderPatches, stagers: RankStagers, layout: Sequence[str], troubles: Sequence[Any] = ()
    ) -> None:
        self.disks = dict[str, SimulatedFiles]()
        #: What was on each disk when a step was acknowledged, the newest last.
        self._earlier = dict[str, list[Disk]]()
        #: The hosts that there are again after the next job.
        self.returns = list[str]()
        #: The hosts of the last job.
        self.present = set[str]()
        self.has_damage = False
        #: The hosts where a power cut may have undone a deletion in part.
        self.half_deleted = set[str]()
        super().__init__(patches, stagers, layout, troubles)

    def new_job(self, number: int, count: int) -> FolderJob:
        self.present = {*self.hosts}
        job = FolderJob(self, number, count - 1)
        if self.returns:  # for the next one
            lost = self.cluster.network.lost
            self.hosts, self.returns = [f"{host}'" if host in lost else host for host in self.returns], []
        return job

    def may_end_after(self, number: int) -> bool:
        return super().may_end_after(number) and self.hosts == [*self.jobs[-1].hosts]  # else who was away comes back

    @property
    def is_refused(self) -> bool:
        """Whether what there is was lost in part, or damaged, and nothing else is left: all ranks say so."""
        last = [each.error for each in self.resumed_at_peers if each.job == self.jobs[-1].number]
        damaged = self.has_damage and all(type(each) is CheckpointCorruptError for each in last)
        is_told = damaged or all("none that can be used" in str(each) for each in last)
        is_lost = not any(claim.all_there and self.is_here(claim) for claim in self.memory_claims)
        has_lost = bool(self.losses) or not all(map(self.is_here, self.memory_claims))
        return has_lost and is_lost and not self.durable and is_told

    def disk_of(self, host: str) -> SimulatedFiles:
        if host not in self.disks:
            self.disks[host] = SimulatedFiles(Disk())
            self.disks[host].make_folders(os.path.dirname(local_root(host)))
        return self.disks[host]

    def phase(self, process: SimulatedProcess, what: str) -> str:
        usual = self.phase_of.get(process, "find")
        return "agree" if what == "store" and usual == "find" else usual

    def on_network(self, process: SimulatedProcess, client: SimulatedProcess) -> None:
        """An operation on a connection: that of who has connected."""
        self.operation(client, "")

    # What was acknowledged

    def was_saved(self, job: PeerJob, step: int, *, in_memory: bool) -> None:
        """All local folders together have a step."""
        if (job.number, step) not in self.in_memory:
            for host in {*job.hosts} & self.disks.keys():
                self._earlier.setdefault(host, []).append(copy.deepcopy(self.disks[host].disk))
        super().was_saved(job, step, in_memory=in_memory)
        self.memory_claims = [claim for claim in self.memory_claims if claim.step > step - KEPT]

    def damage(self, host: str, step: int) -> None:
        """What a host has of a step is damaged."""
        self.has_damage = True
        self.losses.append((self.simulation.now, host))
        for claim in self.memory_claims:
            if claim.step == step:
                claim.lost.add(host)

    def claimed(self) -> tuple[int, int, int]:
        """See the base class; what other hosts have does not count."""
        local = [claim.step for claim in self.memory_claims if claim.all_there and self.is_here(claim)]
        return max(local, default=0), *super().claimed()[1:]

    def is_here(self, claim: Claim) -> bool:
        """Whether all hosts that have a part of a step are those of the last job."""
        return {*claim.hosts} <= self.present

    def earlier(self, host: str) -> Disk:
        """What was on a disk before its newest step."""
        disks = self._earlier.get(host, [])
        return copy.deepcopy(disks[-2]) if len(disks) > 1 else Disk()

    def newest_part(self, host: str) -> str | None:
        """The folder of the newest checkpoint that a host has a part of."""
        files, root = self.disk_of(host), local_root(host)
        steps = [name for name in files.names(root) if files.exists(f"{root}/{name}/manifest.json")]
        return f"{root}/{max(steps)}" if steps else None


def wrong_in_folders(life: FolderLife, *, ended: bool) -> list[str]:
    """What must never be, and is."""
    wrong = violations(life, ended=ended)
    for host, files in life.disks.items():
        root = local_root(host)
        for name in [] if life.has_damage else files.names(root):
            for token in attempts_in(files, f"{root}/{name}"):
                if is_quarantined(files, f"{root}/{name}/{token}") and not is_half_deleted(life, f"{name}/{token}"):
                    wrong.append(f"{name} on {host} was set aside as damaged, and nothing was")
    return wrong


def is_half_deleted(life: FolderLife, data: str) -> bool:
    """Whether files of an attempt are gone, and others of the same host came back with the power."""
    for host in life.half_deleted:
        files, folder = life.disk_of(host), f"{local_root(host)}/{data}"
        if files.exists(f"{folder}/{QUARANTINED}"):
            names = hosts_of(decode_manifest(files.read(f"{folder}/{QUARANTINED}", MAX_BYTES), folder))[host]
            if not all(files.exists(f"{folder}/{name}") for name in names):
                return True
    return False
