"""Published weights: the versions that are there, the host that receives them, and what a reader of its folder sees."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from publishing.published_format import changed, tensors_in
from world.host_disks import SCRATCH
from world.times import LONG

from ckpt_component.core.commit.manifest import MAX_BYTES
from ckpt_component.core.commit.names import MANIFEST, OWNER
from ckpt_component.errors import CheckpointError, CheckpointTimeoutError
from ckpt_component.events.event_file import read_events
from ckpt_component.publishing.local_copy import STATE
from ckpt_component.publishing.receiver import Receiver
from ckpt_component.publishing.versions import NAMES
from ckpt_component.testing.simulation import SimulatedProcess

if TYPE_CHECKING:
    from world.world import Job, World

#: The disk of each host, and what is there; and the folder of the versions, on the storage of the run.
MIRROR, FOLDER, VERSIONS = f"{SCRATCH}/mirror", f"{SCRATCH}/weights", "/runs/weights"
#: How many versions are kept, and after how many deltas one is whole.
KEPT, WHOLE_EVERY = 1, 2
#: The host that receives versions; how often its receiver looks, and when it ends for want of a new one, in seconds.
HOST = "serving"
_POLL, _ENDS = 1.0, 2.5
#: How many receivers come after a job has ended, at most.
_TRIES = 20
INDEX = "model.safetensors.index.json"
_OF_MIRROR = {".ckpt-mirror", STATE, ".ckpt-checksums.json", "model.safetensors"}


@dataclass(frozen=True)
class Version:
    """A version that is committed: its manifest, and its files."""

    manifest: Mapping[str, Any]
    files: Mapping[str, bytes]

    @property
    def base(self) -> int | None:
        """The version whose changes it has."""
        return self.manifest["weights"].get("base")  # type: ignore[no-any-return]

    @property
    def attempt(self) -> str:
        """Which one it is, of those that ever had this number."""
        return str(self.manifest["attempt"])


class Weights:
    """See the top of this file.

    Args:
        world: where

    Attributes:
        spoilt: the versions that somebody has damaged or deleted: the attempt of each number
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.spoilt = dict[int, str]()
        #: Whether what a reader sees was damaged.
        self._is_spoilt = False
        #: What a reader saw last: the files, their version, and what it has open.
        self._seen, self._number, self._cuts = dict[str, bytes](), 0, 0
        self._open = list[tuple[int, Any, bytes]]()
        self._happened, self._calm_since = 0, 0.0
        self._receiver: SimulatedProcess | None = None

    # The receiver

    def follow(self, job: Job) -> None:
        """Have a receiver, which is started again when it has ended, until it has what the job has published."""
        simulation = self._world.simulation
        self._receiver = supervisor = simulation.process(f"supervisor {job.number}", HOST)
        supervisor.start(self._supervise, supervisor, job)

    def _supervise(self, supervisor: SimulatedProcess, job: Job) -> None:
        is_over, tries = False, _TRIES
        while not is_over and tries:
            receiver = self._world.simulation.process(f"receiver {job.number}", HOST)
            self._world.others[receiver] = "receive"
            was_over, errors = all(rank.process.is_dead for rank in job.ranks), list[Exception]()
            receiver.start(self._receive, receiver, errors)
            while not receiver.is_dead:
                supervisor.outside.sleep(0.5)
            supervisor.outside.sleep(0.5)
            is_over = was_over and not receiver.is_killed and not errors and not self._is_behind()
            tries -= was_over
        supervisor.end()

    def _receive(self, receiver: SimulatedProcess, errors: list[Exception]) -> None:
        self.look()
        try:
            with Receiver(VERSIONS, FOLDER, storage_of=partial(self._world.storage, receiver)) as made:
                for _ in made.follow(_POLL, _ENDS):
                    pass
        except CheckpointTimeoutError:
            pass
        except (CheckpointError, OSError) as error:
            errors.append(error)
            if not self._world.happened:
                self._world.wrong.append(f"a receiver that nothing happened to: {error!r}")
        finally:
            receiver.end()

    # What happens

    def spoil(self) -> str | None:
        """Somebody is about to damage or delete a version; returns its path."""
        versions = self._versions()
        if not versions:
            return None
        number = self._world.choice(*versions)
        self.spoilt[number] = versions[number].attempt
        return f"{VERSIONS}/{NAMES.folder(number)}"

    def spoil_received(self) -> None:
        """What a reader has is about to be damaged."""
        self._is_spoilt, self._open = bool(self._seen), []

    # What a reader of the folder sees

    def changed(self, process: SimulatedProcess, path: str) -> None:
        """A process has changed something: a receiver nothing but its own disk, where a reader looks at once."""
        if self._world.others.get(process) == "receive":
            if path.startswith(f"{VERSIONS}/"):
                self._world.wrong.append(f"a receiver has changed {path}")
            self.look()

    def look(self) -> None:
        """The folder has one version, whole, and a later one each time; what is open does not change."""
        disk, cuts = self._world.local.disk_of(HOST), [each.kind for each in self._world.happened].count("power_cut")
        if cuts != self._cuts:  # which of the last two versions it is then is free
            self._cuts, self._number, self._seen, self._open = cuts, 0, {}, []
        seen = {name: disk.read(f"{FOLDER}/{name}", MAX_BYTES) for name in disk.names(FOLDER)}
        if seen != self._seen:
            self._seen = seen
            try:
                self._world.wrong += self._wrong_in(seen)
            except (LookupError, ValueError, struct.error) as error:
                if not self._is_spoilt:
                    self._world.wrong.append(f"a reader cannot read {sorted(seen)}: {error!r}")
        if any(bytes(file.data) != data for _, file, data in self._open):
            self._world.wrong.append("a file changed under a reader")

    def _wrong_in(self, seen: Mapping[str, bytes]) -> Iterator[str]:
        """What is wrong with the folder, where a file has changed."""
        if STATE not in seen:
            if seen or self._number:
                yield f"the folder has no state after version {self._number}, and {sorted(seen)}"
            return
        state, before = json.loads(seen[STATE]), self._number
        number = self._number = state["version"]
        if number != before:
            self._is_spoilt = False
            self._read_on(number)
        if number < before <= max(self._versions(), default=0) and before not in self.spoilt:  # else it was deleted
            yield f"the folder is at version {number} after {before}"
        found = {name: data for file in seen if file != STATE for name, data in tensors_in(seen[file])[0].items()}
        if not self._is_spoilt and found not in self._trained(state["step"]):
            yield f"the folder says version {number}, and has other weights than step {state['step']}"

    def _read_on(self, number: int) -> None:
        """A reader opens the files of each second version, until it opens the next ones."""
        disk = self._world.local.disk_of(HOST)
        if number % 2:
            for held, _, _ in self._open:
                disk.release(held)
            self._open = []
            for name, data in self._seen.items():
                path = f"{FOLDER}/{name}"
                self._open.append((int(disk.hold(path) or 0), disk.disk.file(path), data))

    # What must hold

    def wrong(self) -> Iterator[str]:
        """What is wrong after a job. Waits until the receiver has what it has published."""
        world, job = self._world, self._world.jobs[-1]
        yield from self._catches_up()
        versions = self._versions()
        yield from self._wrong_in_versions(versions)
        told = self._told()
        newest = max(versions.keys() | self.spoilt.keys(), default=0)
        for number, step in told.items():
            if number > newest - KEPT and number not in versions:
                yield f"version {number} was reported, and there are {[*versions]}"
            elif number in versions and versions[number].manifest["step"] != step:
                yield f"version {number} has step {versions[number].manifest['step']}, and {step} was reported"
        if len(world.happened) > self._happened:
            self._happened, self._calm_since = len(world.happened), world.simulation.now
        is_calm = not self._happened or world.simulation.now - self._calm_since > LONG
        if is_calm and job.is_whole:
            yield from self._left_behind(versions)

    def _catches_up(self) -> Iterator[str]:
        world, supervisor = self._world, self._receiver
        if supervisor is None:
            return
        outside, since = world.simulation.current.process.outside, world.simulation.now
        while not supervisor.is_dead and world.simulation.now - since < 2 * LONG:
            outside.sleep(0.5)
        if not supervisor.is_dead:
            yield "the receiver hangs"
        world.has_waited("receive", since)
        self.look()
        if self._is_behind() and all(job.has_ended for job in world.jobs):
            yield f"the receiver is at version {self._number}, and the newest one is {max(self._versions())}"

    def _is_behind(self) -> bool:
        """Whether the receiver does not have the newest version, and can have it."""
        versions = self._versions()
        newest = max(versions, default=0)
        return self._number != newest and self._is_sound(newest, versions)

    def _wrong_in_versions(self, versions: Mapping[int, Version]) -> Iterator[str]:
        newest = max(versions, default=0)
        missing = {*range(max(newest - KEPT, 0) + 1, newest)} - versions.keys() - self.spoilt.keys()
        if missing:
            yield f"versions {missing} are not there, and {newest} is"
        for number, version in versions.items():
            if self.spoilt.get(number) == version.attempt:
                continue
            there = {name: (len(data), zlib.crc32(data)) for name, data in version.files.items()}
            if there != {entry["name"]: (entry["size"], entry["crc32"]) for entry in version.manifest["files"]}:
                yield f"version {number} has other files than its manifest says: {sorted(there)}"
            if version.base is not None and version.base not in versions.keys() | self.spoilt.keys():
                yield f"version {number} has lost its base {version.base}"
            if self._is_sound(number, versions):
                step = version.manifest["step"]
                if _weights(number, versions) not in self._trained(step):
                    yield f"version {number} is not step {step}"

    def _left_behind(self, versions: Mapping[int, Version]) -> Iterator[str]:
        world, kept = self._world, {*range(max(versions, default=0) - KEPT + 1, max(versions, default=0) + 1)}
        while bases := {base for number in kept & versions.keys() if (base := versions[number].base)} - kept:
            kept |= bases
        here, mirror = world.local.disk_of(HOST), world.local.disk_of(world.jobs[-1].hosts[0])
        left = {
            VERSIONS: {*world.files.names(VERSIONS)} - {OWNER, *map(NAMES.folder, kept | self.spoilt.keys())},
            MIRROR: {*mirror.names(MIRROR)} - _OF_MIRROR,
            SCRATCH: {*here.names(SCRATCH)} - {"weights", ".ckpt-pull.weights"},
            "the folder beside it": {*here.names(f"{SCRATCH}/.ckpt-pull.weights")},
        }
        yield from (f"left behind in {path}: {sorted(names)}" for path, names in left.items() if names)

    def _told(self) -> dict[int, int]:
        """The step of each version that was reported, and that nobody has damaged or deleted."""
        events = [each for each in read_events(self._world.root, self._world.files) if each["event"] == "publish"]
        done = [(each["version"], each["step"]) for each in events if each["outcome"] == "published"]
        return {number: step for number, step in done if number not in self.spoilt}

    def _trained(self, step: int) -> list[dict[str, bytes]]:
        """What the weights of a step may be: each job has its own."""
        world = self._world
        states = [world.state(job, step)["shared"] for job, begun, rank in world.begun if begun == step and not rank]
        return [{name: _bytes_of(tensor) for name, tensor in state.items()} for state in states]

    def _versions(self) -> dict[int, Version]:
        """The versions that are committed, and can be read."""
        files, found = self._world.files, dict[int, Version]()
        for name in files.names(VERSIONS) if files.is_folder(VERSIONS) else ():
            path, number = f"{VERSIONS}/{name}", NAMES.step(name)
            if number is not None and files.exists(f"{path}/{MANIFEST}"):
                try:
                    manifest = json.loads(files.read(f"{path}/{MANIFEST}", MAX_BYTES))["manifest"]
                    data = f"{path}/{manifest.get('at', '')}".rstrip("/")
                    names = [each for each in files.names(data) if not each.startswith((MANIFEST, ".ckpt-folder"))]
                    there = {each: files.read(f"{data}/{each}", MAX_BYTES) for each in names}
                    found[number] = Version(manifest, there)
                except (ValueError, LookupError, TypeError):
                    if number not in self.spoilt:
                        raise
        return found

    def _is_sound(self, number: int, versions: Mapping[int, Version]) -> bool:
        """Whether all is there that a version builds on, as it was published."""
        if number not in versions or self.spoilt.get(number) == versions[number].attempt:
            return False
        base = versions[number].base
        return base is None or self._is_sound(base, versions)


def _weights(number: int, versions: Mapping[int, Version]) -> dict[str, bytes]:
    """The weights of a version, by a reader that knows the format alone."""
    version, shards = versions[number], dict[str, tuple[bytes, str]]()
    weights = dict[str, bytes]()
    for name, data in version.files.items():
        if name.endswith(".safetensors"):
            tensors, metadata = tensors_in(data)
            weights |= tensors
            shards |= {key: (tensors[key], metadata[key]) for key in tensors if key in metadata}
    if version.base is None:
        return weights
    about, weights = json.loads(version.files[INDEX])["metadata"], _weights(version.base, versions)
    if (int(about["version"]), int(about["base_version"])) != (number, version.base):
        return {}
    return weights | {name: changed(about["delta_encoding"], data, weights[name]) for name, (data, _) in shards.items()}


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
