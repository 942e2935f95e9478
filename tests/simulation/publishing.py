"""A run that publishes its weights, on simulated disks: what happens to its publisher, and what must hold after that."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckpt_component.core.commit.names import OWNER
from ckpt_component.core.storage.storage import Storage
from ckpt_component.errors import CheckpointError
from ckpt_component.exporting.export import ExportOptions
from ckpt_component.publishing.publish_options import PublishOptions
from ckpt_component.publishing.publisher import Published, Publisher
from ckpt_component.testing import Disk, Fault, PowerCut, SimulatedObjects
from ckpt_component.testing.machine import Machine

from .published_versions import PublishedVersions
from .trained import ALL_NEW, COUNT, LARGER, MODEL, SAME, Trained, path_of

TO, MIRROR = "/shared/weights", "/local/mirror"
KINDS = ("folder", "mounted", "bucket")
OPTIONS = PublishOptions(
    export=ExportOptions("hf", max_shard_bytes=6_000, config_from=MODEL), delta="auto", whole_every=3, keep=3
)
#: Longer than a process that gave no sign of life is held to be alive.
_QUIET_SECONDS = 600.0


@dataclass
class Publishing:
    """What a run has published so far, and where it publishes to.

    Attributes:
        trained: its checkpoints
        kind: of the target: a folder; one without renames, as a mounted store has; a bucket
        options: of the publisher
        disk: of the publisher's host
        target: where the versions are
        run: the token of the run
        told: the steps whose versions were reported, by number
        shown: the attempt of each version that was ever there, by number
        steps: how many steps were published, or tried
    """

    trained: Trained
    kind: str
    options: PublishOptions = OPTIONS
    disk: Disk = field(default_factory=Disk)
    target: Disk | SimulatedObjects = field(default_factory=Disk)
    run: str = "one"
    told: dict[int, int] = field(default_factory=dict)
    shown: dict[int, str] = field(default_factory=dict)
    steps: int = 0

    @classmethod
    def begin(cls, trained: Trained, kind: str, options: PublishOptions = OPTIONS) -> Publishing:
        return cls(trained, kind, options, trained.host(), SimulatedObjects() if kind == "bucket" else Disk())

    def again(self) -> Publishing:
        """The same on disks of its own."""
        return replace(
            self,
            disk=copy.deepcopy(self.disk),
            target=copy.deepcopy(self.target),
            told={**self.told},
            shown={**self.shown},
        )

    def storage(self, machine: Machine) -> Storage:
        """The target, as a process sees it."""
        return storage_of(machine, self.target, self.kind)

    def publisher(self, machine: Machine) -> Publisher:
        return Publisher(
            self.storage(machine), TO, MIRROR, self.options, self.run, machine.files(self.disk, durable=False)
        )

    def publish(self, checkpoint: int, machine: Machine | None = None) -> Published:
        """Publish a checkpoint as the next step."""
        machine = machine or Machine()
        self.steps += 1
        step = COUNT * self.steps + checkpoint
        done = self.publisher(machine).publish(self.trained.files, path_of(checkpoint), step, machine.outside.date())
        self.told[done.version] = step
        return done

    def power_goes_off(self, seed: int) -> None:
        self.disk.cut_power(seed)
        self.target.cut_power(seed)

    def time_passes(self) -> None:
        """Until what is dead is held to be dead."""
        self.disk.now += _QUIET_SECONDS
        self.target.now += _QUIET_SECONDS

    def weights(self, step: int) -> Mapping[str, bytes]:
        """What the weights of a step are, as they were trained."""
        return self.trained.weights[step % COUNT]

    def versions(self) -> PublishedVersions:
        return PublishedVersions(self.target, TO)

    def violations(self, *, lost: Collection[int] = ()) -> Iterator[str]:
        """What must never be, and is.

        Args:
            lost: versions that somebody deleted
        """
        versions = self.versions()
        yield from versions.violations() if not lost else ()
        taken = {int(name[8:]) for name in self.storage(Machine()).names(TO) if name.startswith("weight_v")}
        numbers = sorted(versions)
        gaps = {*range(min(numbers, default=0), max(numbers, default=0))} - {*numbers, *lost} - taken
        if any(versions[number].base is not None for number in numbers if number - 1 in gaps):
            yield f"the numbers are {numbers}"
        newest = max(self.told, default=0)
        if newest > max(numbers, default=0):
            yield f"version {newest} was reported, and there are {numbers}"
        for number, version in versions.items():
            if self.shown.setdefault(number, version.attempt) != version.attempt:
                yield f"version {number} was another one before"
            if number in self.told and version.manifest["step"] != self.told[number]:
                yield f"version {number} has step {version.manifest['step']}, and {self.told[number]} was reported"
            if versions.has_chain(number) and versions.weights(number) != self.weights(version.manifest["step"]):
                yield f"version {number} is not step {version.manifest['step']}"

    def goes_on(self, *checkpoints: int) -> Iterator[str]:
        """The next life of the publisher: what is wrong with what it publishes."""
        self.time_passes()
        for checkpoint in checkpoints:
            try:
                done = self.publish(checkpoint)
            except (CheckpointError, OSError) as error:
                yield f"the next publisher: {type(error).__name__}: {error}"
                return
            versions = self.versions()
            if done.version != max(versions, default=0):
                yield f"version {done.version} was published, and there are {[*versions]}"
            yield from self.violations()
        kept = [number for number in self.versions() if number <= max(self.versions()) - self.options.keep]
        if kept and self.versions()[min(self.versions())].base is not None:
            yield f"what is kept does not begin with a whole version: {[*self.versions()]}"
        extra = [
            name for name in self.storage(Machine()).names(TO) if not name.startswith("weight_v") and name != OWNER
        ]
        if extra:
            yield f"left behind: {extra}"


def storage_of(machine: Machine, target: Disk | SimulatedObjects, kind: str) -> Storage:
    if isinstance(target, SimulatedObjects):
        return machine.bucket(target)
    return machine.files(target, atomic_rename=kind == "folder")


@dataclass(frozen=True)
class Act:
    """What a publisher does while something happens to it.

    Attributes:
        name: its name
        checkpoint: that it publishes
        before: the checkpoints that were published before
        prepare: what was done then
    """

    name: str
    checkpoint: int
    before: tuple[int, ...] = ()
    prepare: Callable[[Publishing], None] = lambda publishing: None

    def __str__(self) -> str:
        return self.name

    def ready(self, trained: Trained, kind: str) -> Publishing:
        publishing = Publishing.begin(trained, kind)
        for checkpoint in self.before:
            publishing.publish(checkpoint)
        self.prepare(publishing)
        publishing.time_passes()
        return publishing


def lose_mirror(publishing: Publishing) -> None:
    """Delete it, some time before whatever happens next: half of it does not come back after a power cut."""
    files = Machine().files(publishing.disk)
    files.remove_tree(MIRROR)
    files.sync_folder(os.path.dirname(MIRROR))


def change_options(publishing: Publishing) -> None:
    publishing.options = replace(OPTIONS, export=replace(OPTIONS.export, max_shard_bytes=100_000), delta="overwrite")


ACTS = [
    Act("first", 0),
    Act("delta", 2, (0, 1)),
    Act("same", SAME, (0, SAME - 1)),
    Act("all_new", ALL_NEW, (0, 1)),
    Act("larger", LARGER, (0, 1)),
    Act("whole_due", 4, (0, 1, 2, 3)),
    Act("retention", 0, (0, 1, 2, 3, 4, 5)),
    Act("lost_mirror", 2, (0, 1), lose_mirror),
    Act("other_options", 2, (0, 1), change_options),
]


class Trials:
    """An act of a publisher, and each run of it with what happens to it.

    Attributes:
        operations: of the act, and its end
    """

    def __init__(self, act: Act, trained: Trained, kind: str) -> None:
        self._act = act
        self._ready = act.ready(trained, kind)
        usual, machine = self._ready.again(), Machine()
        usual.publish(act.checkpoint, machine)
        self.operations = [*machine.operations, ("end", "")]
        wrong = [*usual.violations(), *usual.goes_on(1, 2)]
        assert not wrong, wrong

    def wrong(self, number: int, fault: Fault, seeds: Collection[int | None] = (None,)) -> Iterator[str]:
        """What is wrong after a fault at an operation.

        Args:
            number: of the operation
            fault: what happens
            seeds: of the power cuts after that; None: no power cut
        """
        trial, told, before = self._ready.again(), None, max(self._ready.versions(), default=0)
        try:
            trial.publish(self._act.checkpoint, Machine({number: fault}))
        except PowerCut:
            pass
        except (CheckpointError, OSError) as error:
            told = error
            if max(trial.versions(), default=0) > before and not fault.lasts:  # undoing it failed too
                yield f"{fault.kind} at operation {number} {self.operations[number - 1]}: it is there, and {error!r}"
        for seed in seeds:
            after = trial.again()
            if seed is not None:
                after.power_goes_off(seed)
            name, path = self.operations[number - 1]
            for text in [*after.violations(), *after.goes_on(1, 2)]:
                yield f"{fault.kind} at operation {number} ({name} {path}), seed {seed}, {told!r}: {text}"
