"""A run that keeps its snapshots in memory, dies, and comes back: what may happen to it, and what must hold."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from simulation.keepers import Host, HostPatches, ReachedKeeper
from simulation.rank_states import RankStagers, blank, state_of
from simulation.waits import Wait, waits_for_the_dead

from ckpt_component import CheckpointCorruptError, Checkpointer, CheckpointError, CheckpointSaveError
from ckpt_component.callers.memory_caller import MemoryCaller
from ckpt_component.callers.write_callers import WriteCaller
from ckpt_component.core.commit.commit import new_attempt
from ckpt_component.core.commit.names import MEGATRON, owned_token
from ckpt_component.core.commit.protocol import Attempt
from ckpt_component.core.commit.protocols import protocol_of
from ckpt_component.core.commit.retention import RetentionPolicy
from ckpt_component.core.coordination import RankStore, StoreCoordinator
from ckpt_component.core.coordination.connection import StoreConnection
from ckpt_component.core.options import Prove, ResolvedTimeouts, Verify
from ckpt_component.core.storage.memory.host_memory import HostMemory
from ckpt_component.core.storage.memory.keeper_sockets import memory_root
from ckpt_component.core.storage.memory.memory_files import MemoryFiles
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.core.storage.storage import Storage
from ckpt_component.core.writing.request import WriteRequest
from ckpt_component.core.writing.write_job import run_write_job
from ckpt_component.events import EventRecorder
from ckpt_component.loading.collective import CollectiveLoad, CollectiveLoads
from ckpt_component.loading.reader import Reader
from ckpt_component.managing.policies import ResumePolicy
from ckpt_component.managing.restore import Restorer
from ckpt_component.managing.run_context import RunContext
from ckpt_component.managing.run_folder import RunFolder
from ckpt_component.managing.run_memory import RunMemory
from ckpt_component.saving.attempts import SaveAttempts
from ckpt_component.saving.context import NoRun, SaveContext
from ckpt_component.saving.records import Admitted, SaveRequest, Staged
from ckpt_component.stagers.base import Snapshot
from ckpt_component.testing import Disk, SimulatedFiles
from ckpt_component.testing.process_files import ProcessFiles
from ckpt_component.testing.simulated_store import SimulatedStore
from ckpt_component.testing.simulation import SimulatedProcess, Simulation

if TYPE_CHECKING:
    from simulation.troubles import Trouble

T = TypeVar("T")

ROOT = "/runs/one"
TIMEOUTS = ResolvedTimeouts(stage=20.0, write=60.0, close=20.0, heartbeat=10.0, stall=60.0, visible=20.0)
PHASES = ("stage", "give", "keep", "vote", "commit", "find", "agree", "verify", "copy")
#: A whole life must have ended by then, in simulated seconds.
LIMIT = 3000.0


class DurableCaller(WriteCaller):
    """Writes files at once, in one operation."""

    in_other_process = False

    def __init__(self, process: SimulatedProcess, files: SimulatedFiles) -> None:
        self._process, self._files = process, files

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        self._process.turn()
        attempt = Attempt(protocol_of(self._files), **request.attempt.to_plain())
        try:
            return run_write_job(replace(request, fs=self._files, attempt=attempt))
        except OSError as error:
            raise CheckpointSaveError(f"{attempt.target}: {error}", error.errno) from error


class ReadFiles(MemoryFiles):
    """Each read is an operation of the process."""

    process: SimulatedProcess
    life: Life

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        if self.life.host.in_simulation:
            self.life.operation(self.process, "")
            self.process.turn()
        return super().fill(name, buffer, offset)


class TrainerMemory(HostMemory):
    """The memory of the host as a trainer sees it."""

    def __init__(self, life: Life, process: SimulatedProcess, own: ReachedKeeper | None) -> None:
        super().__init__(life.host.find(process), own, process.outside)
        self._life, self._process = life, process

    def open_files(self, folder: str, *, shared: bool = True) -> ReadFiles:
        files = ReadFiles(folder, partial(self._keepers, folder))
        files.life, files.process = self._life, self._process
        return files


class PhasedLoad(CollectiveLoad):
    """A load whose phases are those of a life."""

    def __init__(self, life: Life, process: SimulatedProcess, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._life, self._process = life, process

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with super().phase(name):
            self._life.phase_of[self._process] = {"open": "verify", "read": "copy"}.get(name, "agree")
            self._life.reading.add(self._process)
            try:
                yield
            finally:
                self._life.phase_of[self._process] = "agree"


class PhasedLoads(CollectiveLoads):
    """Makes them."""

    def __init__(self, life: Life, process: SimulatedProcess, ranks: StoreCoordinator) -> None:
        super().__init__(ranks, TIMEOUTS)
        self._life, self._process = life, process

    def load(self, about: str, tag: str | None = None, name: str = "load") -> CollectiveLoad:
        return PhasedLoad(self._life, self._process, self._ranks, self._timeouts, about, tag, name)


class Loader(Checkpointer):
    """Loads by a reader alone."""

    def __init__(self, ranks: StoreCoordinator, events: EventRecorder, reader: Reader) -> None:
        super().__init__(cast(Any, SimpleNamespace(ranks=ranks, events=events)), reader)

    def save(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError


class LabelledStore(SimulatedStore):
    """A store whose requests are operations of a life."""

    life: Life

    def fault(self) -> None:
        self.life.operation(self.life.simulation.current.process, "store")


class GivingCaller(MemoryCaller):
    """That a rank gives its snapshot to its keeper is an operation of a life."""

    def __init__(self, life: Life, process: SimulatedProcess, connect: Any) -> None:
        super().__init__(connect, process.outside)
        self._life, self._trainer = life, process

    def run(self, request: WriteRequest, deadline: float) -> Mapping[str, Any]:
        usual = self._life.phase_of[self._trainer]
        self._life.phase_of[self._trainer] = "give"
        self._life.operation(self._trainer, "")
        self._life.phase_of[self._trainer] = usual
        self._trainer.turn()
        return super().run(request, deadline)


@dataclass
class Resumed:
    """What a rank got from its restore: a step, or an error.

    `in_memory` and `durable` are the newest steps that were acknowledged before it, and `harmed` says whether keepers or
    what they keep were harmed.
    """

    job: int
    rank: int
    step: int | None
    state: Mapping[str, Any] | None
    error: Exception | None
    in_memory: int
    durable: int
    harmed: bool


class Job:
    """A run of the trainers: restores, and saves `count` steps, of which the even ones also go to the folder."""

    def __init__(self, life: Life, number: int, count: int) -> None:
        self.life, self.number, self.count = life, number, count
        self.processes = [life.simulation.process(f"trainer {rank} of job {number}") for rank in range(life.ranks)]
        self.token = new_token(self.processes[0].outside)
        self.store = LabelledStore(self.processes[0])
        self.store.life = life
        self.done = list[int]()
        self.began_at = 0

    def start(self) -> None:
        for rank, process in enumerate(self.processes):
            process.start(self._train, rank, process)

    def kill(self) -> None:
        for process in self.processes:
            if not process.is_dead:
                process.kill()

    @property
    def is_over(self) -> bool:
        """Whether a trainer has died, or all have done what they were to do."""
        return any(process.is_dead for process in self.processes) or len(self.done) == self.life.ranks

    def _train(self, rank: int, process: SimulatedProcess) -> None:
        try:
            self._run(rank, process)
        except CheckpointError as error:
            self.life.errors.append(f"job {self.number} rank {rank}: {type(error).__name__}: {error}")
            process.kill()
        self.done.append(rank)

    def _run(self, rank: int, process: SimulatedProcess) -> None:
        life, outside = self.life, process.outside
        life.phase_of[process] = "agree"
        connection = StoreConnection(self.store.connect(process), TIMEOUTS.heartbeat, opens=False, outside=outside)
        store = RankStore(connection, rank, life.ranks, f"{self.number}/")
        ranks = StoreCoordinator(store, TIMEOUTS.heartbeat, TIMEOUTS.stall)
        root = memory_root(ROOT, self.token)
        connect = partial(life.host.keeper_of, process, root, rank, life.ranks)
        own = ReachedKeeper(connect().keeper, process)
        memory, plain = TrainerMemory(life, process, own), life.files

        def storage_of(path: str) -> Storage:
            return memory if memory.holds(path) else plain

        events = EventRecorder(rank=rank, world_size=life.ranks, run=self.token)
        run = RunContext(plain, ROOT, MEGATRON, ranks, TIMEOUTS, events=events, elsewhere=storage_of)
        folder = RunFolder(run, ResumePolicy(), RetentionPolicy(last=None), takeover=True)
        reader = Reader(
            rank,
            life.ranks,
            Verify.on_resume,
            shared=False,
            storage_of=storage_of,
            prove=Prove.off,
            collective=PhasedLoads(life, process, ranks),
        )
        kept = RunMemory(run, life.host.tokens)
        restorer = Restorer(Loader(ranks, events, reader), folder, True, kept)
        state, acknowledged = blank(life.ranks), (newest(life.in_memory), newest(life.durable))
        life.phase_of[process] = "find" if rank == 0 else "agree"
        try:
            step = life.waiting(self, rank, lambda: restorer.load(state, True, False))
        except CheckpointError as error:
            life.resumed.append(Resumed(self.number, rank, None, None, error, *acknowledged, life.harmed))
            raise
        life.reading.discard(process)
        life.resumed.append(Resumed(self.number, rank, step, state, None, *acknowledged, life.harmed))
        self.began_at = step or 0
        caller = GivingCaller(life, process, lambda timeout: connect())
        hooks = NoRun(storage_of)
        if ranks.is_leader:
            hooks.ownership = folder.ownership  # type: ignore[assignment]
        context = SaveContext(ranks, storage_of, TIMEOUTS, hooks)
        writer = life.stagers.writer
        in_memory = SaveAttempts(caller, writer, replace(context, queue="memory/"))
        durable = SaveAttempts(DurableCaller(process, plain), writer, context)
        own_token = folder.ownership.token
        for number in range(1, self.count + 1):
            at = (step or 0) + number
            outside.sleep(1.0)
            ranks.at_step(at)
            life.phase_of[process] = "stage"
            life.operation(process, "")
            process.turn()
            snapshot = life.take(rank, self.number, at)
            life.operation(process, "")
            process.turn()
            life.phase_of[process] = "commit"
            name = MEGATRON.folder(at)
            token, owner = ranks.meet(
                "save", name, lambda _: [owned_token(new_token(outside)), own_token], outside.now() + 60.0
            )
            path = os.path.join(root, name)
            try:
                in_memory.run(*self._staged(memory, path, at, snapshot, token), 1)
            except CheckpointError as error:  # the older snapshot stays
                life.errors.append(f"job {self.number} rank {rank}: {error}")
            else:
                life.acknowledged(self.number, at, in_memory=True)
                if ranks.is_leader:
                    kept.end_others()
                caller.retire([path], 10.0)
            if at % 2 == 0:
                seen = ProcessFiles(process, plain)
                durable.run(*self._staged(seen, os.path.join(ROOT, name), at, snapshot, token, owner), 1)
                life.acknowledged(self.number, at, in_memory=False)

    def _staged(
        self, files: Storage, path: str, step: int, snapshot: Snapshot, token: str, owner: str = ""
    ) -> tuple[Staged, Attempt]:
        """A staged save, and its first attempt."""
        attempt = new_attempt(files, path, token, owner)
        admitted = Admitted(SaveRequest(path, files, step), cast(Any, None), step, token, {"run": self.token})
        return Staged(admitted, attempt, snapshot, None, None, 0, 0.0), attempt


class Life:
    """One life of a run: jobs one after the other, as a launcher starts them, until one has come to its end in peace.

    Args:
        patches: entered
        stagers: take the snapshots
        troubles: what happens, one after the other
        seed: decides the schedule
    """

    #: The last job may come to its end although not all that was to happen did.
    most_jobs = 6
    #: Simulated seconds; a restore takes one of them.
    patience = 5.0

    def __init__(
        self, patches: HostPatches, stagers: RankStagers, troubles: Sequence[Trouble] = (), seed: int = 1
    ) -> None:
        self.simulation = Simulation(seed)
        self.stagers = stagers
        self.host = self.make_host(patches)
        self.files = SimulatedFiles(Disk())
        self.files.make_folders(ROOT)
        self.phase_of = dict[SimulatedProcess, str]()
        #: How many operations each phase had; and since the last trouble.
        self.operations = Counter[str]()
        self._since = Counter[str]()
        self.resumed = list[Resumed]()
        self.waited = list[Wait]()
        #: From when until when a process was stopped, or a link not well, so that others may wait for it.
        self.unwell = list[tuple[float, float]]()
        self.errors = list[str]()
        self.in_memory = list[tuple[int, int]]()
        self.durable = list[tuple[int, int]]()
        self.snapshots = list[Snapshot]()
        self._troubles = [*troubles]
        self.jobs = list[Job]()
        self._launcher = self.simulation.process("launcher")
        self.flipped = self.is_in_peace = False
        #: Who verifies and copies now; and how many bits were flipped where it may go unnoticed.
        self.reading = set[SimulatedProcess]()
        self.late_flips = 0
        self.staged = set[tuple[int, int, int]]()
        self.happened: list[Trouble] = []

    def make_host(self, patches: HostPatches) -> Host:
        """Where the jobs run."""
        host = Host(self.simulation, self.operation)
        patches.use(host)
        return host

    def new_job(self, number: int, count: int) -> Job:
        """The next job, which saves so many steps."""
        return Job(self, number, count)

    def run(self) -> bool:
        """Returns whether all has ended in time."""
        self._launcher.start(self._launch)
        try:
            return self.simulation.run(LIMIT)
        finally:
            self.host.clear(self.stagers.descriptors)
            for snapshot in self.snapshots:
                while snapshot.arena is not None:
                    snapshot.release(reusable=not self.flipped)

    def _launch(self) -> None:
        outside = self._launcher.outside
        for number in range(1, self.most_jobs + 1):
            job = self.new_job(number, 3 if number == 1 else 2)
            self.jobs.append(job)
            job.start()
            while not job.is_over:
                outside.sleep(0.5)
            was_whole = len(job.done) == self.ranks and not any(process.is_dead for process in job.processes)
            outside.sleep(2.0)
            job.kill()  # all at once; or the launcher has noticed that one has died
            if was_whole and (self.may_end_after(number) or number == self.most_jobs):
                self.is_in_peace = True
                return
            outside.sleep(self.pause_after(number))

    def may_end_after(self, number: int) -> bool:
        """Whether no other job need follow one that has come to its end."""
        return number > 2 and not self._troubles

    def pause_after(self, number: int) -> float:
        """How long the launcher waits after a job."""
        return 1.0

    def operation(self, process: SimulatedProcess, what: str) -> None:
        """Count an operation, and let happen what is to happen at it."""
        phase = self.phase(process, what)
        self.operations[phase] += 1
        self._since[phase] += 1
        if self._troubles and self._since[phase] == self._troubles[0].number and phase == self._troubles[0].phase:
            trouble = self._troubles.pop(0)
            self._since.clear()
            self.happened.append(trouble)
            trouble.befall(self)

    def phase(self, process: SimulatedProcess, what: str) -> str:
        """The phase of an operation."""
        usual = self.phase_of.get(process, "agree")
        is_saving = usual in ("stage", "commit")
        return what if what == "keep" else ("vote" if is_saving else "agree") if what == "store" else usual

    def take(self, rank: int, job: int, step: int) -> Snapshot:
        snapshot = self.stagers.take(rank, job, step)
        self.snapshots.append(snapshot)
        self.staged.add((job, step, rank))
        return snapshot

    def acknowledged(self, job: int, step: int, *, in_memory: bool) -> None:
        saves = self.in_memory if in_memory else self.durable
        if (job, step) not in saves:
            saves.append((job, step))

    @property
    def ranks(self) -> int:
        """How many ranks a job has."""
        return self.stagers.ranks

    def waiting(self, job: Job, rank: int, restore: Callable[[], T]) -> T:
        """Restore on a rank, and note how long it takes."""
        since = self.simulation.now
        try:
            return restore()
        finally:
            self.waited.append(Wait(job.number, rank, since, self.simulation.now))

    def excuses(self) -> Iterator[tuple[float, float]]:
        """From when until when a process may wait: for one that is stopped, or the heartbeats of one that has died."""
        yield from self.unwell
        for job in self.jobs:
            ends = [process.ended_at for process in job.processes]
            yield min(ends), min(max(ends), min(ends) + 2 * TIMEOUTS.heartbeat)

    @property
    def harmed(self) -> bool:
        """Whether a keeper, or what it keeps, was harmed so far."""
        return any(trouble.harms for trouble in self.happened)


def newest(saves: Sequence[tuple[int, int]]) -> int:
    return max((step for _, step in saves), default=0)


def violations(life: Life, *, ended: bool) -> list[str]:
    """What must never be, and is."""
    wrong = [] if ended else ["a call hangs"]
    if ended and not life.is_in_peace and not refused_in_words(life):
        wrong.append(f"no job came to its end: {life.errors}")
    for job in sorted({each.job for each in life.resumed}):
        there = [each for each in life.resumed if each.job == job and each.error is None]
        if len({each.step for each in there}) > 1:
            wrong.append(f"job {job} begins at other steps on other ranks: {[each.step for each in there]}")
        for each in there:
            told = f"rank {each.rank} of job {job} at step {each.step}"
            least = each.durable if each.harmed else max(each.in_memory, each.durable)
            if (each.step or 0) < least:
                wrong.append(f"{told}, and step {least} was acknowledged; {life.happened}")
            assert each.state is not None
            wrong += [f"{told}: {text}" for text in wrong_in(life, each.step, each.state)]
    return [*wrong, *waits_for_the_dead(life)]


def refused_in_words(life: Life) -> bool:
    """Whether no job may begin: the folder of the sockets is another user's, or all that there is is damaged."""
    errors = [each.error for each in life.resumed if each.job == life.resumed[-1].job]
    damaged = life.flipped and not life.durable and any(isinstance(error, CheckpointCorruptError) for error in errors)
    return life.host.belongs_to_another or damaged


def wrong_in(life: Life, step: int | None, state: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a restored state."""
    job, own, _ = state["rank0"]["step"]
    if own != (step or 0):
        yield f"its state is that of step {own}"
        return
    ranks = life.ranks
    if step is not None and not {(job, step, rank) for rank in range(ranks)} <= life.staged:
        yield "not all ranks had a snapshot"
    expected = blank(ranks) if step is None else state_of(job, step, ranks)
    for name, part in expected.items():
        different = int((part["weight"].view(torch.int32) != state[name]["weight"].view(torch.int32)).sum())
        if part["step"] != state[name]["step"] or different > life.late_flips:
            yield f"{name} is not what it was: {state[name]['step']} for {part['step']}"
