"""Ranks that save together on a simulated disk, over a simulated store, without managers: there may be thousands."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from simulation.rank_writer import RankWriter, content, snapshot

from ckpt_component import CheckpointError, CheckpointSaveError
from ckpt_component.core.commit.commit import new_attempt, refuse_existing
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.manifest import data_folder
from ckpt_component.core.commit.names import MEGATRON, owned_token
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
