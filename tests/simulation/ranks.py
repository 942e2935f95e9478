"""Ranks that save together on a simulated disk or bucket, over a simulated store; what happens, and what must hold."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from rank_writer import RankWriter, content, snapshot
from strides import first_of

from ckpt_component import CheckpointError, CheckpointSaveError
from ckpt_component.core.commit.commit import new_attempt, refuse_existing
from ckpt_component.core.commit.fencing import FencingToken, read_owner
from ckpt_component.core.commit.manifest import data_folder
from ckpt_component.core.commit.names import MANIFEST, MEGATRON, OWNER, owned_token
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.coordination import RankStore, StoreCoordinator
from ckpt_component.core.coordination.connection import StoreConnection
from ckpt_component.core.options import ResolvedTimeouts
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.core.storage.storage import Storage
from ckpt_component.saving.attempts import SaveAttempts
from ckpt_component.saving.context import NoRun, SaveContext
from ckpt_component.saving.records import Admitted, SaveRequest, Staged
from ckpt_component.testing import Disk, Fault, SimulatedBucket, SimulatedFiles, SimulatedObjects
from ckpt_component.testing.process_files import ProcessFiles
from ckpt_component.testing.simulated_bucket import ProcessBucket
from ckpt_component.testing.simulated_store import MessageFault, SimulatedStore
from ckpt_component.testing.simulation import SimulatedProcess, Simulation

ROOT = "/runs/one"
TIMEOUTS = ResolvedTimeouts(stage=20.0, write=60.0, heartbeat=10.0, stall=60.0, visible=20.0)
#: For so long a rank waits for the others at the beginning of a save.
MEETING = 60.0
#: A call of a save must return or raise within this, whatever happened.
LONGEST_SAVE = MEETING + TIMEOUTS.stage + TIMEOUTS.write + 60.0
STEPS = (1, 2, 3)
#: A save after all trouble, at this time; and when a run must have ended.
LAST, CALM = 9, 300.0
#: Where only a connection breaks, a save is over by then.
SOON = 15.0
#: Errors of a rank that has not heard how a save ended.
UNKNOWN = ("has not answered", "cannot reach the store", "to decide", "sent no heartbeat")
LIMIT = CALM + LONGEST_SAVE + 60.0


@dataclass
class Outcome:
    """What a rank got from the save of a step, and when."""

    rank: int
    step: int
    error: Exception | None
    began: float
    ended: float


@dataclass
class Job:
    """A run of several ranks, which save `steps` one after the other; `LAST` when all is calm.

    Attributes:
        simulation: where it runs
        files: the disk or bucket, as no process sees it
        world_size: number of ranks
        steps: the steps
        faults: what happens to the messages
        name: of the run
        pause: simulated seconds between two saves
    """

    simulation: Simulation
    files: SimulatedFiles | SimulatedBucket
    world_size: int
    steps: Sequence[int] = (*STEPS, LAST)
    faults: dict[int, MessageFault] = field(default_factory=dict)
    name: str = "run"
    pause: float = 1.0
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.processes = [self.simulation.process(f"{self.name} {rank}") for rank in range(self.world_size)]
        self.store = SimulatedStore(self.processes[0], self.faults)
        self.token = ""

    def start(self, when: float = 0.0) -> None:
        for rank, process in enumerate(self.processes):
            process.start(self._train, rank, process, after=when)

    def _train(self, rank: int, process: SimulatedProcess) -> None:
        outside = process.outside
        connection = StoreConnection(self.store.connect(process), TIMEOUTS.heartbeat, opens=False, outside=outside)
        ranks = StoreCoordinator(
            RankStore(connection, rank, self.world_size, f"{self.name}/"), TIMEOUTS.heartbeat, TIMEOUTS.stall
        )
        files, writer = storage_of(process, self.files), cast(Any, RankWriter(self.name))
        run = NoRun(lambda path: files)
        if rank == 0:
            ownership = FencingToken(files, ROOT)
            run.ownership, self.token = ownership, ownership.token  # type: ignore[assignment]
        attempts = SaveAttempts(writer, writer, SaveContext(ranks, lambda path: files, TIMEOUTS, run))
        for step in self.steps:
            outside.sleep(CALM - self.simulation.now if step == LAST else self.pause)
            ranks.at_step(step)
            began, error = self.simulation.now, None
            try:
                self._save(step, ranks, files, attempts, run.ownership.token)
            except Exception as failure:
                error = failure
            self.outcomes.append(Outcome(rank, step, error, began, self.simulation.now))
        ranks.close()

    def _save(self, step: int, ranks: StoreCoordinator, files: Storage, attempts: SaveAttempts, owner: str) -> None:
        path = os.path.join(ROOT, MEGATRON.folder(step))

        def admit(proposals: list[Any]) -> list[str]:
            assert {*proposals} == {path}
            try:
                refuse_existing(files, path)
            except OSError as error:  # as the admission of a save does
                raise CheckpointSaveError(str(error), error.errno) from error
            return [owned_token(new_token(files.outside)), owner]

        token, owner = ranks.meet("save", path, admit, ranks.outside.now() + MEETING, path)
        attempt = new_attempt(files, path, token, owner)
        admitted = Admitted(SaveRequest(path, files, step), cast(Any, None), step, token, {"run": self.name})
        attempts.run(Staged(admitted, attempt, snapshot(), None, None, 0, 0.0), attempt, 1)


def files_of(protocol: str, faults: Mapping[int, Fault] | None = None) -> SimulatedFiles | SimulatedBucket:
    """An empty disk, or a bucket, with the folder of the runs."""
    files: SimulatedFiles | SimulatedBucket
    if protocol == "bucket":
        files = SimulatedBucket(SimulatedObjects(), faults)
    else:
        rename = protocol == "rename"
        files = SimulatedFiles(Disk(), faults, atomic_rename=rename, locks=rename)
    files.make_folders(ROOT)
    return files


def storage_of(process: SimulatedProcess, files: SimulatedFiles | SimulatedBucket) -> Storage:
    """The storage as a process sees it."""
    return ProcessBucket(process, files) if isinstance(files, SimulatedBucket) else ProcessFiles(process, files)


def unsafe(files: SimulatedFiles | SimulatedBucket, *jobs: Job) -> list[str]:
    """What must never be, whatever happened."""
    found, runs = scan_steps(files, ROOT, MEGATRON), {job.name: job for job in jobs}
    wrong = [f"step {step}: {why}" for step, why in {**found.damaged, **found.torn, **found.unusable}.items()]
    for step in found.committed:
        manifest, folder = found.manifests[step], os.path.join(ROOT, MEGATRON.folder(step))
        run, data = runs[manifest["run"]], data_folder(files, folder, manifest)
        for rank in range(run.world_size):
            path = os.path.join(data, f"rank_{rank}")
            if not files.exists(path) or files.read(path, 1000) != content(run.name, step, rank):
                wrong.append(f"step {step} of {run.name} is committed without the part of rank {rank}")
        failed = [each for each in run.outcomes if each.step == step and each.error is not None]
        wrong += [
            f"step {step} was reported as failed by {run.name} {each.rank}, and is there: {each.error}"
            for each in failed
            if each.rank == 0 or not any(text in str(each.error) for text in UNKNOWN)
        ]
    for job in jobs:
        for each in job.outcomes:
            if each.error is not None and not isinstance(each.error, CheckpointError):
                wrong.append(f"{job.name} {each.rank} raised {each.error!r}")
            manifest = found.manifests.get(each.step, {})
            if each.error is None and (each.step not in found.committed or manifest["run"] != job.name):
                wrong.append(f"step {each.step} was reported by {job.name} {each.rank}, and is not there")
    return wrong


def lasting(files: SimulatedFiles | SimulatedBucket, seed: int, *jobs: Job) -> list[str]:
    """What a power cut changes about it; nothing in a bucket."""
    if isinstance(files, SimulatedBucket):
        return []
    disk = copy.deepcopy(files.disk)
    disk.cut_power(seed)
    after = SimulatedFiles(disk, atomic_rename=files.atomic_rename)
    return [f"after a power cut: {text}" for text in unsafe(after, *jobs)]


def stuck(job: Job) -> list[str]:
    """Ranks whose last save failed, after all trouble."""
    return [f"not alive: {each}" for each in job.outcomes if each.step == LAST and each.error is not None]


def late(job: Job, bound: float = LONGEST_SAVE) -> list[str]:
    """Calls that took longer than they may."""
    return [
        f"step {each.step} on {job.name} {each.rank} took {each.ended - each.began:.0f} s: {each.error}"
        for each in job.outcomes
        if each.ended - each.began > bound
    ]


class Schedule:
    """A run of one to four ranks in which something happens; a seed is a schedule.

    Attributes:
        what: what happens
        wrong: what is wrong then
    """

    def __init__(self, seed: int, protocol: str) -> None:
        choice = random.Random(seed)
        self.what, self.wrong, self._storage = list[str](), list[str](), dict[int, Fault]()
        simulation, files = Simulation(seed), files_of(protocol, self._storage)
        job = Job(simulation, files, choice.choice((1, 2, 2, 3, 3, 4, 4)))
        job.start()
        jobs = [job]
        self._trouble(job, choice)
        if choice.random() < 0.2:  # another run takes over, while this one is there or stopped
            when = choice.uniform(1.0, 4.0)
            other = Job(simulation, files, choice.randint(1, 3), name="other")
            other.start(when)
            jobs.append(other)
            self.what.append(f"another run from {when:.2f}")
        if isinstance(files, SimulatedBucket):
            files.disk.lag, files.disk.lag_seconds = choice.choice((0, 0, 3, 20)), choice.choice((0.1, 2.0))
        if not simulation.run(LIMIT):
            self.wrong.append("it has not ended")
        if isinstance(files, SimulatedBucket):
            files.disk.lag = 0
        self.wrong += (
            unsafe(files, *jobs) + lasting(files, seed, *jobs) + [text for each in jobs for text in late(each)]
        )
        killed = any(process.is_killed for process in job.processes)
        if len(jobs) == 2:
            self.wrong += overtaken(files, *jobs)
        elif not killed:
            self.wrong += stuck(job)
        if all(text.startswith(("lost", "unanswered", "date", "storage")) for text in self.what):
            self.wrong += late(job, SOON)
        elif all(text.startswith(("kill", "date")) for text in self.what):
            self.wrong += late(job, TIMEOUTS.heartbeat + SOON)
        self.wrong += self._next_run(seed, files)

    def _next_run(self, seed: int, files: SimulatedFiles | SimulatedBucket) -> list[str]:
        """What is wrong with the run that follows: it saves, and deletes what was left."""
        self._storage.clear()
        files.disk.now += 600
        after = Job(Simulation(seed), files, 1 + seed % 4, steps=(21,), name="next")
        after.start()
        after.simulation.run(LIMIT)
        wrong = [f"the next run: {each}" for each in after.outcomes if each.error is not None]
        wrong += [f"the next run: {text}" for text in late(after, SOON)]
        left = [name for name in files.names(ROOT) if MEGATRON.step(name) is None and name != OWNER]
        left += [
            f"{name}/{inside}"
            for name in files.names(ROOT)
            if MEGATRON.step(name) is not None and not files.exists(os.path.join(ROOT, name, MANIFEST))
            for inside in files.names(os.path.join(ROOT, name))
        ]
        return wrong + [f"left behind: {left}"] * bool(left)

    def _trouble(self, job: Job, choice: random.Random) -> None:
        """Let something happen to a run before its last save."""
        simulation = job.simulation
        for _ in range(choice.choice((1, 1, 2, 3))):
            when, rank = choice.uniform(0.9, 4.0), choice.randrange(job.world_size)
            process = job.processes[rank]
            kind = choice.choice(("kill", "stop", "slow", "date", "storage", "message", "message", "message"))
            if kind == "kill":
                simulation.at(when, process.kill)
            elif kind == "stop":
                seconds = choice.choice((0.5, 5.0, 15.0, 40.0, 100.0))
                kind = f"stop for {seconds} s"
                simulation.at(when, partial(process.stop, seconds))
            elif kind == "slow":
                process.slowness = choice.choice((3.0, 30.0))
                simulation.at(20.0, partial(setattr, process, "slowness", 1.0))
            elif kind == "date":
                simulation.at(when, partial(setattr, process, "date_offset", choice.choice((-1e6, 1e6))))
            elif kind == "storage":
                number, fails = (
                    choice.randrange(5, 60 * job.world_size),
                    choice.choice(("fail", "lost", *["twice"] * isinstance(job.files, SimulatedBucket))),
                )
                self._storage[number] = Fault(fails)
                simulation.at(CALM - 1.0, self._storage.clear)
                kind = f"storage: operation {number} {fails}"
            else:
                number = choice.randrange(1, 150 * job.world_size)
                fault = MessageFault(choice.choice(("lost", "unanswered", "late")), choice.choice((0.1, 3.0, 20.0)))
                job.faults[number] = fault
                kind = f"{fault.kind}: request {number}, {fault.seconds} s"
            self.what.append(f"{kind} (rank {rank}, at {when:.2f})")


def overtaken(files: SimulatedFiles | SimulatedBucket, *jobs: Job) -> list[str]:
    """What a run has committed that was replaced before it looked at the owner file for the last time."""
    owner, path = read_owner(files, ROOT), os.path.join(ROOT, OWNER)
    old = [job.name for job in jobs if owner is not None and job.token != owner.token]
    replaced = max(number for number, (name, at) in enumerate(files.operations) if at == path and name != "get")
    wrong = []
    for step, manifest in scan_steps(files, ROOT, MEGATRON).manifests.items():
        # The last operation before that look; in a bucket, it is the put of the draft.
        draft = f"{manifest['attempt']}/{MANIFEST}.draft"
        last = [
            at.endswith(draft) if name == "put" else name == "sync_folder" and manifest["attempt"] in at
            for name, at in files.operations
        ]
        if manifest["run"] in old and any(last[replaced:]):
            wrong.append(f"step {step} was committed by {manifest['run']}, which another run had replaced")
    return wrong


def each_request(kind: str, protocol: str, world_size: int = 2, stride: int = 1) -> list[str]:
    """What is wrong if one request is lost, unanswered or late, or its sender stopped or killed: each n-th of a save."""

    def job(number: int, *steps: int) -> Job:
        # The same seed, so that all is the same up to this request.
        made = Job(Simulation(1), files_of(protocol), world_size, steps, {number: MessageFault(kind, 20.0)})
        made.start()
        assert made.simulation.run(LIMIT)
        return made

    wrong = []
    for number in range(first_of(stride), job(0, 1).store.requests + 1, stride):
        done = job(number, 1, LAST)
        bound = {"late": LONGEST_SAVE, "stopped": LONGEST_SAVE, "killed": TIMEOUTS.heartbeat + SOON}.get(kind, SOON)
        found = unsafe(done.files, done) + late(done, bound) + (stuck(done) if kind != "killed" else [])
        # A rank that has never sent a heartbeat may still be starting, so it is waited for.
        wrong += [f"request {number} {kind}: {text}" for text in found if "it has sent no heartbeat" not in text]
    return wrong
