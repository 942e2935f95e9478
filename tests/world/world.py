"""A world: hosts, processes, storages and a launcher, in which one run lives a life while troubles come.

    wrong = World(Case("disk", "ab", "train", (Trouble("kill", "save", 17),), seed=3)).live()

What runs is the package as a user has it: `build_manager` builds each rank's manager from a config. Simulated are what
is outside of it: time, threads, connections and processes (`SimulatedOutside`), the disks and buckets, and the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import world.troubles  # noqa: F401  the kinds of trouble, which this lists
from kept_configs import compose_once
from simulated.hosts import SimulatedHosts
from world.host_disks import FINISH, SCRATCH, HostDisks
from world.memory import Memory
from world.scripts import SCRIPTS, Script
from world.states import part_of, state_of
from world.storages import new_storage, seen_by
from world.strangers import Strangers
from world.times import DEADLINE, LONG, UNNOTICED, VISIBLE
from world.trouble import Hit, Trouble
from world.verdict import PATIENCE, Fence, Folder, wrong_in, wrong_in_folder
from world.weights import VERSIONS, Weights

from ckpt_component import Checkpointer, CheckpointError, CheckpointManager
from ckpt_component.config import Checkpoint, resolve_config
from ckpt_component.core.commit.liveness import QUIET_SECONDS
from ckpt_component.core.commit.manifest import data_folder
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.coordination import RankStore, StoreCoordinator
from ckpt_component.core.coordination.connection import StoreConnection
from ckpt_component.core.storage.storage import Storage
from ckpt_component.core.waits import SHOWN_SECONDS, LongWait
from ckpt_component.factory.graph import build_checkpointer, manager_of
from ckpt_component.factory.launch import Launch
from ckpt_component.publishing.versions import NAMES
from ckpt_component.state.tensors import tensor_bytes
from ckpt_component.testing import Disk, DiskFile, Fault, SimulatedBucket
from ckpt_component.testing.simulated_store import MessageFault, SimulatedStore
from ckpt_component.testing.simulation import SimulatedProcess

T = TypeVar("T")

ROOT = "/runs/one"
#: Simulated seconds.
HEARTBEAT, STALL = 10.0, 30.0
USUAL = (
    "checkpoint.save.every_steps=1000000",
    "checkpoint.save.at_end=false",
    "checkpoint.writer.workers=1",
    "checkpoint.events=false",
    "checkpoint.timeouts.stage=20",
    "checkpoint.timeouts.write=60",
    "checkpoint.timeouts.close=20",
    f"checkpoint.timeouts.visible={VISIBLE:g}",
    f"checkpoint.timeouts.heartbeat={HEARTBEAT:g}",
    f"checkpoint.timeouts.stall={STALL:g}",
)
#: A life is over after so many.
LIFETIME = 3600.0
#: How often a launcher looks after its job, and how long it takes to notice that a rank has ended.
_POLL, _NOTICES = 0.5, 2.0


@dataclass(frozen=True)
class Case:
    """All that decides a life; it is the same each time.

    Attributes:
        storage: of the run's folder: one of `storages.KINDS`
        hosts: the host of each rank, a letter each
        script: what the jobs do: a name in `scripts.SCRIPTS`
        troubles: what happens, one after the other
        seed: of the schedule
    """

    storage: str
    hosts: str
    script: str
    troubles: tuple[Trouble, ...] = ()
    seed: int = 1

    @property
    def is_patient(self) -> bool:
        """Whether the launcher lets the ranks that are left end by themselves, after one has died."""
        return self.seed % 2 == 0

    def __str__(self) -> str:
        return " ".join([self.storage, self.hosts, self.script, str(self.seed), *map(str, self.troubles)])

    @classmethod
    def of(cls, text: str) -> Case:
        """The inverse of `str`."""
        storage, hosts, script, seed, *troubles = text.split()
        return cls(storage, hosts, script, tuple(map(Trouble.of, troubles)), int(seed))


class Operation(NamedTuple):
    """Something that a process does outside of itself.

    Attributes:
        call: what its rank is doing: `begin`, `restore`, `save`, `close`, `command`; empty: nothing of the package;
            `orphan`: it has died, and a process that it had launched has not; `publish`: one that makes a version;
            `receive`: one on another host that follows these
        kind: `look` or `change` of a storage, `message` to the store, or `wire`: use of another connection
        name: of what is done there
        path: where
    """

    call: str
    kind: str
    name: str = ""
    path: str = ""


@dataclass
class Told:
    """What a call has told a rank: from when until when it took, its step if it is a save, and its error."""

    job: int
    rank: int
    call: str
    since: float
    step: int = 0
    until: float = 0.0
    error: BaseException | None = None


@dataclass
class Waited:
    """A long wait of a process, which is a rank's, or was launched by it: for whom, from when until when."""

    process: SimulatedProcess
    rank: Rank
    whom: str
    since: float
    until: float


@dataclass
class Resumed:
    """What a restore has told a rank: a step with a state.

    Attributes:
        least: the newest step that was acknowledged before it
    """

    job: int
    rank: int
    step: int | None
    state: Mapping[str, Any]
    least: int


@functools.cache
def settings_of(preset: str, *overrides: str) -> Checkpoint:
    """A config, which is read once."""
    return resolve_config(compose_once(preset, [*USUAL, *overrides]))


def memory_files() -> Iterator[tuple[int, int]]:
    """The memory of images, of all simulated processes: inodes, and a descriptor of each by which it is written."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            is_writable = fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            if is_writable and os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:"):
                yield os.fstat(int(name)).st_ino, int(name)


class World:
    """See the top of this file.

    Args:
        case: what happens
        script: what the jobs do, if it is none of `SCRIPTS`

    Attributes:
        simulation: time, and the processes
        files: the storage of the run's folder, as no process sees it
        jobs: that were started, in their order
        operations: how often each was done
        told: what calls have told the ranks
        waited: waits of all processes that were shown
        resumed: what restores have given them
        saved: the job and step of each save that was acknowledged, in order
        begun: the job, step and rank of each save that began
        damaged: steps whose bytes were damaged, and in which job; a later one may save them anew
        has_damage: whether there were any, since the beginning
        free: steps that were given up: they may be there or not
        refused: errors that calls had to raise
        copies: which step was copied to the name of another one
        bases: the weights that do not change at each step, at a step of a job; at 0 of 0, those to restore into
        hosts: of the ranks of the next job: where one was lost, another one has its place
        returns: those of the job after it, if one of them is away for that
        memory: what must still be in the memory of hosts
        local: disks of hosts, and what must still be there
        weights: what is published, and who receives it
        others: processes that no rank has started, and the call that they are in
        wrong: what was wrong so far
        strangers: other runs on the same hosts
        full_until: until when a host has no memory for copies
        flips: how many bits of the memory were flipped, which nobody notices who has yet to sum them
        happened: the troubles that came
        excuses: from when until when who waits may wait, and for what
        is_in_peace: whether a job came to its end, and nothing more was to happen
        lived_on: processes of ranks that lived when the last job was over
    """

    def __init__(self, case: Case, script: Script | None = None) -> None:
        self.case, self.root = case, ROOT
        self.script = script or SCRIPTS[case.script]
        self.simulation = SimulatedHosts(case.seed)
        self.simulation.storage_of = self.storage
        self.simulation.free_memory = lambda host: 1 << 40 if self.simulation.now >= self.full_until[host] else 0
        self.simulation.network.operation = lambda sock: self.operation(sock.process, "wire")
        self.waited, self._watched = list[Waited](), dict[SimulatedProcess, Callable[[], None]]()
        self.files = new_storage(case.storage)
        self.files.make_folders(ROOT)
        self.jobs = list[Job]()
        self.operations = Counter[Operation]()
        self.told, self.resumed = list[Told](), list[Resumed]()
        self.saved, self.begun = list[tuple[int, int]](), set[tuple[int, int, int]]()
        self.damaged, self.free, self.copies = dict[int, int](), set[int](), dict[int, int]()
        self.bases = dict[tuple[int, int], Mapping[str, torch.Tensor]]()
        self.refused, self.has_damage = list[BaseException](), False
        self.hosts, self.returns = (*case.hosts,), tuple[str, ...]()
        self.memory, self.flips = Memory(), 0
        self.local = HostDisks(self)
        self.others = dict[SimulatedProcess, str]()
        self.weights: Weights = Weights(self)
        self.strangers = list[Strangers]()
        self.full_until = defaultdict[str, float](float)
        self._earlier = {*memory_files()}
        self.happened, self.excuses = list[Trouble](), list[tuple[float, float]]()
        self.is_in_peace, self.lived_on = False, list[SimulatedProcess]()
        #: Folders that are open on each disk, and of which process.
        self.folders = defaultdict[Disk, dict[int, SimulatedProcess]](dict)
        self.wrong, self._fences = list[str](), [Fence(self.root), Fence(VERSIONS, NAMES)]
        #: What every later change of a storage meets, until the job has ended.
        self.lasting: Fault | None = None
        self._pending, self._since = [*case.troubles], 0
        self._rank_of = dict[SimulatedProcess, Rank]()

    def live(self) -> list[str]:
        """Live this life; returns what was wrong."""
        launcher = self.simulation.process("launcher")
        launcher.start(self._launch, launcher)
        with torch.no_grad():  # one thread of torch is all simulated ones
            has_ended = self.simulation.run(LIFETIME)
            wrong = [*self.wrong, *wrong_in(self, has_ended=has_ended)]
        for watched in self._watched.values():
            watched()
        self.simulation.forget()
        return wrong

    def start(self, name: str = "job", after: float = 0.0) -> Job:
        """Start the next job."""
        job = Job(self, len(self.jobs) + 1, name)
        self.jobs.append(job)
        self._rank_of.update({rank.process: rank for rank in job.ranks})
        self.local.claims.are_present(job.hosts)
        if self.returns:
            lost = self.simulation.network.lost
            self.hosts, self.returns = tuple(f"{host}'" if host in lost else host for host in self.returns), ()
        for rank in job.ranks:
            rank.process.start(rank.live, after=after)
        return job

    def _launch(self, launcher: SimulatedProcess) -> None:
        """Start jobs one after the other, as torchrun does, until one has come to its end and nothing more happens."""
        is_over = False
        while not is_over and len(self.jobs) < self.script.most_jobs:
            is_over = self._has_run(launcher) and len(self.jobs) >= self.script.jobs and not self._pending
            launcher.outside.sleep(1.0)
        launcher.outside.sleep(LONG)  # longer than a lease
        self.lose_memory()
        self._pending = []  # jobs that failed at once were too few for all troubles
        self.is_in_peace = self._has_run(launcher)
        self.lived_on = self.clients()
        for job in self.jobs:  # also a second run
            job.kill()

    def _has_run(self, launcher: SimulatedProcess) -> bool:
        """Run a job; returns whether it came to its end."""
        job = self.start()
        while not job.is_over:
            launcher.outside.sleep(_POLL)
        launcher.outside.sleep(_NOTICES)
        while self.case.is_patient and not job.has_ended:
            launcher.outside.sleep(_POLL)
        is_whole = job.is_whole
        job.kill()
        self.lasting = None
        if isinstance(self.files, SimulatedBucket):
            self.files.disk.lag = 0  # what follows sees what is there
        launcher.outside.sleep(0.0)  # what has ended lets go of its locks
        if job.number == 1:
            self.script.between(self)
        if is_whole:  # its uploads have ended, too
            self.local.uploaded.update(self.committed)
        wrong = [text for folder in self.places for text in wrong_in_folder(self, folder)]
        wrong += self.script.wrong(self)
        self.wrong += [f"after job {job.number}: {text}" for text in wrong]
        self.gives_up(())
        return is_whole

    def storage(self, process: SimulatedProcess, path: str) -> Storage:
        """The storage of a path, as a process sees it."""
        for each in self.strangers:
            if process in each.processes or process.parent in each.processes:
                return each.storage(process)
        is_local = f"{path}/".startswith(f"{SCRATCH}/")
        return seen_by(process, self, self.local.disk_of(process.host) if is_local else self.files)

    @property
    def places(self) -> list[Folder]:
        """The folders of the run, as no process sees them, and what must be there."""
        script = self.script
        acknowledged = {step: job for job, step in self.saved if step not in self.free}
        if "folders" not in script.has:
            return [Folder(self.files, self.root, script.kept, acknowledged, self.damaged)]
        uploaded = dict[int, int | None].fromkeys(self.local.uploaded - self.free)
        return [Folder(self.files, self.root, script.kept, uploaded, self.damaged), self.local.folder]

    def settings(self, root: str, *overrides: str) -> Checkpoint:
        """The config of a run in a folder."""
        commit = "rename" if self.files.atomic_rename else "manifest"
        usual = (f"checkpoint.commit={commit}", f"checkpoint.keep.last={self.script.keep}")
        return replace(settings_of(self.script.preset, *usual, *self.script.overrides, *overrides), dir=root)

    def rank_of(self, process: SimulatedProcess | None) -> Rank | None:
        """The rank whose process it is, or whose process has launched it."""
        if process in self.others:
            return self.jobs[-1].ranks[0]
        while process is not None and process not in self._rank_of:
            process = process.parent
        return None if process is None else self._rank_of[process]

    # What happens

    def operation(self, process: SimulatedProcess, kind: str, name: str = "", path: str = "") -> Any:
        """A process is about to do something; returns the fault that this meets, if any."""
        rank = self.rank_of(process)
        if rank is None:
            return None
        if process not in self._watched:
            self._watch(process, rank)
        call = self.others.get(process) or ("orphan" if rank.process.is_dead else rank.doing)
        if call != "orphan" and process.name.startswith("publish_process"):
            call = "publish"
        self.operations[Operation(call, kind, name)] += 1
        if self._pending and self._pending[0].fits(operation := Operation(call, kind, name, path)):
            self._since += 1
            if self._since == self._pending[0].number:
                trouble, self._since = self._pending.pop(0), 0
                self.happened.append(trouble)
                victim = rank if trouble.rank < 0 else rank.job.ranks[trouble.rank % len(rank.job.ranks)]
                hit = process if trouble.rank < 0 else victim.process
                fault = trouble.befall(Hit(self, victim, hit, operation))
                if fault is not None:
                    return fault
        return self.lasting if kind == "change" else None

    def _watch(self, process: SimulatedProcess, rank: Rank) -> None:
        """Note for whom a process of a rank waits from now on, as `ckpt memory ls` shows it."""
        began = defaultdict[tuple[str, float], list[float]](list)  # several threads may wait for the same

        def note(wait: LongWait) -> None:
            times = began[wait.whom, wait.since]
            if wait.ended is None:
                times.append(self.simulation.now - SHOWN_SECONDS)
            else:
                self.waited.append(Waited(process, rank, wait.whom, times.pop(), self.simulation.now))

        self._watched[process] = process.outside.waits.tell(note)

    def changed(self, process: SimulatedProcess, name: str, path: str) -> None:
        """A process has changed something."""
        rank = self.rank_of(process)
        if rank is not None:
            for fence in self._fences:
                self.wrong += fence.changed(rank.job.number, name, path)
        self.weights.changed(process, path)

    def choice(self, *values: T) -> T:
        """One of these."""
        return self.simulation.random.choice(values)

    def excuse(self, seconds: float) -> None:
        """From now on, who waits may wait so long."""
        self.excuses.append((self.simulation.now, self.simulation.now + seconds))

    def has_died(self) -> None:
        """A process has died, or left something: without locks, it counts as alive for a while."""
        if not self.files.atomic_rename:
            self.excuse(QUIET_SECONDS + 2 * PATIENCE)

    def has_waited(self, call: str, since: float) -> None:
        """Somebody beside the newest job has waited until now."""
        self.told.append(Told(self.jobs[-1].number, 0, call, since, until=self.simulation.now))

    def gives_up(self, steps: Iterable[int]) -> None:
        """These steps may be there or not from now on; and so may those that have been deleted, as newer ones were there."""
        self.free |= {*steps} | {step for _, step in self.saved} - {*self.committed}

    def acknowledged(self, job: int, step: int, *, in_memory: bool = False) -> None:
        """A rank was told that a step is saved, or kept in memory."""
        if in_memory:
            self.memory.is_kept(job, step, self.jobs[job - 1].hosts)
        elif (job, step) not in self.saved:
            if "folders" in self.script.has:
                self.local.acknowledged(job, step)
            self.saved.append((job, step))
            self.free.discard(step)
            if self.damaged.get(step, job) < job and "folders" not in self.script.has:
                del self.damaged[step]
            if self.has_damage and self.script.has_base and not self._is_base_whole(job, step):
                self.damaged[step] = len(self.jobs)  # a save that reuses files does not read them

    def flip(self, step: int | None = None) -> None:
        """Flip a bit of a checkpoint, in the middle of a tensor; None: of the newest."""
        found = scan_steps(self.files, self.root, MEGATRON)
        if not found.committed:
            return
        step = found.committed[-1] if step is None else step
        said = self.copies.get(step, step)
        states = [self.state(job, said) for job, begun, rank in sorted(self.begun) if begun == said and not rank]
        name = self.choice("weight", "base") if self.script.has_base else "weight"
        found_in = [state["shared"][name] for state in states]
        which = [each if isinstance(each, torch.Tensor) else each[self.choice(*each)] for each in found_in]
        tensors = [tensor.numpy().tobytes() for tensor in which]
        folder = data_folder(self.files, f"{self.root}/{MEGATRON.folder(step)}", found.manifests[step])
        for path in self.files.disk.walk(folder):
            file = self.files.disk.file(path)
            for at in [file.data.find(tensor) for tensor in tensors]:
                if at >= 0:
                    file.data[at + 600] ^= 1
                    file.sync()
                    self.has_damage = True
                    self.damaged |= {each: len(self.jobs) for each in found.committed if self._has(each, file)}
                    return

    def lose_memory(self, *hosts: str) -> None:
        """What is in the memory of hosts may be lost; of all, if none is given."""
        self.memory.lose(self.simulation.now, hosts or {host for job in self.jobs for host in job.hosts})

    def clients(self) -> list[SimulatedProcess]:
        """The processes that ranks have launched, which live."""
        return [each for each in self.simulation.processes if each.parent in self._rank_of and not each.is_dead]

    def flip_memory(self) -> None:
        """Flip a bit of the memory that snapshots are in."""
        found = sorted({*memory_files()} - self._earlier)
        if found:
            descriptor = self.choice(*found)[1]
            at = self.simulation.random.randrange(os.fstat(descriptor).st_size)
            os.pwrite(descriptor, bytes([os.pread(descriptor, 1, at)[0] ^ 1 << self.choice(*range(8))]), at)
            self.flips += 1
            self.lose_memory()

    def lose_host(self, host: str) -> None:
        """What is in the memory of a host, and on its disk, is gone."""
        self.lose_memory(host)
        self.local.lose(host)

    def is_unwell(self, seconds: float) -> None:
        """For a while what hosts have may not be found, nor sent."""
        self.local.may_be_late()
        for each in (self.memory, self.local.claims):
            each.unwell.append((self.simulation.now, self.simulation.now + seconds))

    def _is_base_whole(self, job: int, step: int) -> bool:
        """Whether the weights that do not change are in the files of a checkpoint as they were."""
        base = self.state(job, self.copies.get(step, step))["shared"]["base"]
        disk, below = self.files.disk, f"{self.root}/{MEGATRON.folder(step)}"
        files = [bytes(disk.file(path).data) for path in disk.walk(below) if path.endswith(".distcp")]
        tensors = [base] if isinstance(base, torch.Tensor) else base.values()
        return all(any(bytes(tensor_bytes(tensor)) in data for data in files) for tensor in tensors)

    def _has(self, step: int, file: DiskFile) -> bool:
        """Whether a checkpoint has a file, which several may share."""
        below = self.files.disk.walk(f"{self.root}/{MEGATRON.folder(step)}")
        return any(path.endswith(".distcp") and self.files.disk.file(path) is file for path in below)

    def _has_lost_rank(self, job: int) -> bool:
        """Whether a rank has not come to the end of a job: then its host may not send what the others wait for."""
        ranks = self.jobs[job - 1].ranks
        return any(rank.process.is_killed for rank in ranks) or any(
            each.job == job and each.error for each in self.told
        )

    def excused(self, told: Told) -> Iterator[tuple[float, float]]:
        """From when until when a call may wait for what has failed."""
        yield from self.excuses
        if told.call == "close" and (told.job in self.local.late or self._has_lost_rank(told.job)):
            yield told.since, told.since + FINISH
        own = [each for each in self.told if (each.job, each.rank) == (told.job, told.rank)]
        for died in (rank.process.ended_at for rank in self.jobs[told.job - 1].ranks):
            # One call of each rank waits until it notices that. Who has not begun may still be starting.
            noticed = next((each for each in own if each.until - max(died, each.since) > self.script.patience), None)
            if told is noticed:
                yield max(died, told.since), max(died, told.since) + (DEADLINE if told.call == "begin" else UNNOTICED)

    # What must be

    @property
    def undoing_may_fail(self) -> bool:
        """Whether what failed could not be undone, as more failed."""
        kinds = {"fails_from_then_on", *({"stays_full"} if "folders" in self.script.has else ())}
        return any(trouble.kind in kinds for trouble in self.happened)

    def state(self, job: int, step: int) -> dict[str, Any]:
        """What all ranks know together after a step of a job; step 0: the target of a restore."""
        has_more = "weights" in self.script.has
        state = state_of(job, step, self.ranks, has_base=self.script.has_base, has_more=has_more)
        if (job, step) in self.bases:
            state["shared"]["base"] = {name: tensor.clone() for name, tensor in self.bases[job, step].items()}
        return state

    @property
    def ranks(self) -> int:
        """How many ranks a job has."""
        return len(self.case.hosts)

    def newest(self, since: float) -> int:
        """The newest step that was acknowledged and must be there; `since` when somebody looks for it."""
        is_flipped = any(when >= since for when in self.simulation.network.flipped)
        kept = self.local.claims if "folders" in self.script.has else self.memory
        saved = self.local.uploaded if "folders" in self.script.has else {step for _, step in self.saved}
        durable = max(saved - self.damaged.keys() - self.free, default=0)
        is_unwell = is_flipped or kept.is_unwell(since, self.simulation.now)
        return durable if is_unwell else max(kept.newest, durable)

    @property
    def committed(self) -> list[int]:
        """The steps that a program finds."""
        return scan_steps(self.files, self.root, MEGATRON).committed


class Job:
    """A run of all ranks, which a launcher starts.

    Args:
        world: where
        number: which it is, from 1
        name: of its processes

    Attributes:
        began: when, in simulated seconds
        found: the steps that were committed then
        hosts: of its ranks
        ranks: its ranks
        agent: the process that holds the store: it is torchrun's
    """

    def __init__(self, world: World, number: int, name: str) -> None:
        self.world, self.number, self.name = world, number, name
        self.began, self.found, self.hosts = world.simulation.now, world.committed, world.hosts
        self.agent = world.simulation.process(f"agent of {name} {number}", self.hosts[0])
        self.store = WorldStore(world, self.agent)
        self.ranks = [Rank(self, rank) for rank in range(world.ranks)]

    @property
    def is_over(self) -> bool:
        """Whether a rank has died, or all have done what they were to do."""
        return self.has_ended or any(rank.process.is_dead for rank in self.ranks)

    @property
    def has_ended(self) -> bool:
        """Whether no rank does anything any more."""
        return all(rank.process.is_dead or rank.is_done for rank in self.ranks)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have done what they were to do."""
        return all(rank.is_done for rank in self.ranks)

    def kill(self) -> None:
        """End what is left of it."""
        for process in (*(rank.process for rank in self.ranks), self.agent):
            if not process.is_dead:
                process.kill()


class Rank:
    """One rank of a job: what a training script has in its hands.

    Args:
        job: the job
        number: its rank

    Attributes:
        doing: the call that it is in
        is_done: whether it has come to its end
        error: why it has not
    """

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.world, self.number = job, job.world, number
        self.host = job.hosts[number]
        self.process = self.world.simulation.process(f"rank {number} of {job.name} {job.number}", self.host)
        self.doing, self.is_done = "", False
        self.error: BaseException | None = None

    def live(self) -> None:
        """Do what the script says."""
        try:
            self.world.script.run(self)
            self.is_done = True
        except CheckpointError as error:
            self.error = error
            self.process.kill()

    def waits_for_its_end(self) -> None:
        """It has come to its end, and the launcher kills it; or somebody else, if no launcher knows of it."""
        self.is_done = True
        self.sleep(LONG / 10)
        self.process.kill()

    def sleep(self, seconds: float) -> None:
        """Train for so long."""
        self.process.outside.sleep(seconds)

    @contextlib.contextmanager
    def call(self, name: str, step: int = 0) -> Iterator[None]:
        """A call of the package."""
        told = Told(self.job.number, self.number, name, self.world.simulation.now, step)
        self.doing = name
        try:
            yield
        except CheckpointError as error:
            told.error = error
            raise
        except OSError as error:
            if name != "command":
                raise
            told.error = error  # which `ckpt` says in words
            raise CheckpointError(str(error)) from error
        finally:
            self.doing = ""
            told.until = self.world.simulation.now
            if not self.process.is_dead:
                self.world.told.append(told)

    @contextlib.contextmanager
    def manager(self, *overrides: str) -> Iterator[CheckpointManager]:
        """The manager of this rank; it is closed at the end."""
        with self.call("begin"):
            manager = manager_of(self.world.settings(self.world.root, *overrides), Launch(), **self._parts())
        try:
            yield manager
        finally:
            if not self.process.is_dead:
                with self.call("close"):
                    manager.__exit__(*sys.exc_info())

    @contextlib.contextmanager
    def checkpointer(self) -> Iterator[Checkpointer]:
        """What saves and loads without a manager."""
        with self.call("begin"):
            checkpointer = build_checkpointer(self.world.settings(self.world.root), **self._parts())
        with checkpointer:
            yield checkpointer

    def _parts(self) -> dict[str, Any]:
        """What a manager or checkpointer is given instead of the real ones."""
        return {"outside": self.process.outside, "ranks": self._ranks()}

    def storage(self, path: str) -> Storage:
        """The storage of a path."""
        return self.world.storage(self.process, path)

    def path_of(self, step: int) -> str:
        """Where a step is, or would be."""
        return os.path.join(self.world.root, MEGATRON.folder(step))

    def _ranks(self) -> StoreCoordinator | None:
        """The ranks of the job, as those of `torch.distributed`; None: it is one."""
        if self.world.ranks == 1:
            return None
        connection = StoreConnection(
            self.job.store.connect(self.process), HEARTBEAT, opens=False, outside=self.process.outside
        )
        store = RankStore(connection, self.number, self.world.ranks, "ckpt/")
        return StoreCoordinator(store, HEARTBEAT, STALL)

    def restore(self, manager: CheckpointManager, least: int | None = None) -> int:
        """Restore; returns the step, which is to be this one at least, or the newest that was acknowledged."""
        world, state = self.world, self.world.state(0, 0)
        before = world.newest(self.job.began)
        with self.call("restore"):
            step = manager.restore(state)
        if least is None:
            least = min(before, world.newest(self.job.began))  # what was lost meanwhile need not be there
        for each in (world.memory, world.local.claims):
            each.has_resumed(self.job.number, step or 0)
        world.resumed.append(Resumed(self.job.number, self.number, step, state, least))
        return step or 0

    def save(
        self, manager: CheckpointManager, step: int, base: Mapping[str, torch.Tensor] | None = None, **options: Any
    ) -> None:
        """Save a step, and wait for it. `base`: see `World.bases`."""
        if base is not None:
            self.world.bases[self.job.number, step] = {name: tensor.clone() for name, tensor in base.items()}
        state = self._part(step)
        if base is not None:
            state["shared"]["base"] = base
        with self.call("save", step):
            manager.save(step, state, **options)
            manager.wait()
        if manager.reports[-1].outcome == "committed":
            self.world.acknowledged(self.job.number, step)

    def keep(self, manager: CheckpointManager, step: int) -> None:
        """Take a step of the training loop, which is kept in memory or saved, and wait for that."""
        state = self._part(step)
        with self.call("save", step):
            manager.maybe_save(step, state)
            manager.wait()
        for report in manager.reports:
            if report.step == step and report.outcome == "committed":
                self.world.acknowledged(self.job.number, step, in_memory=report.memory)

    def save_to(self, checkpointer: Checkpointer, step: int) -> None:
        """Save to the path of a step, and wait for it."""
        state = self._part(step)
        with self.call("save", step):
            checkpointer.save(state, self.path_of(step))
            checkpointer.wait()
        self.world.acknowledged(self.job.number, step)

    def _part(self, step: int) -> dict[str, Any]:
        """What this rank saves at a step."""
        self.world.begun.add((self.job.number, step, self.number))
        for each in (self.world.memory, self.world.local.claims):
            each.taken(self.job.number, step, self.world.simulation.now)
        return part_of(self.number, self.world.state(self.job.number, step))


class WorldStore(SimulatedStore):
    """The store of a job, each request to which is an operation of who makes it."""

    def __init__(self, world: World, agent: SimulatedProcess) -> None:
        super().__init__(agent)
        self._world = world

    def fault(self) -> MessageFault | None:
        """What happens to the next request."""
        fault = self._world.operation(self._world.simulation.current.process, "message")
        return fault if isinstance(fault, MessageFault) else None
