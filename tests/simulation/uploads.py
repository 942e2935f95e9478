"""The uploads of a run whose hosts have local folders of their own: the product's uploaders, on simulated time.

Each host has a disk, and all see the target. A process that was killed is started again, as its rank does, unless its
host is lost.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from ckpt_component.background.part_uploader import PartUploader
from ckpt_component.background.run_watch import RunWatch
from ckpt_component.background.upload_policy import UploadPolicy
from ckpt_component.background.uploader import Uploader
from ckpt_component.core.commit.commit import new_attempt
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.manifest import data_folder, read_manifest
from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.commit.part_notes import PartNote, is_called, note_path, read_note, write_note
from ckpt_component.core.commit.retention import RetentionPolicy
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.testing import Disk, SimulatedFiles
from ckpt_component.testing.process_files import ProcessFiles
from ckpt_component.testing.simulation import SimulatedProcess, Simulation

#: The names of as many hosts as there may be; the first one leads.
NAMES = ("host-a", "host-b", "host-c", "host-d")
SOURCE, TARGET, RUN, STEP = "/scratch/run", "/shared/run", "me", 2
#: A host that does not go on is waited for, and the time of a process is over, after so many seconds.
SILENT, LIMIT = 20.0, 150.0
_AGAIN_SECONDS = 2.0
#: For how long all may wait: where nothing happens, and more where this does. Of what else happens no bound is known.
SOON = 6.0
DELAYS = {"kill": 6.0, "stop": 2 * SILENT + 6.0, "lie": SILENT + 6.0}


def read_folders(folder: Path) -> dict[str, dict[str, bytes]]:
    """The files of each host's folder, by path."""
    return {
        host: {
            os.path.join(SOURCE, path.relative_to(folder / host)): path.read_bytes()
            for path in sorted((folder / host).rglob("*"))
            if path.is_file()
        }
        for host in NAMES
        if (folder / host).is_dir()
    }


class HostFiles(ProcessFiles):
    """The files of a disk, as the process of an uploader sees them."""

    def identity(self, path: str) -> tuple[int, int]:
        file = self.file_at(path)
        if file is None:
            raise FileNotFoundError(path)
        return 1, cast(int, file.identity)


class Crew:
    """The uploaders of all hosts.

    Args:
        folders: of the hosts, as of `read_folders`
        atomic_rename: of the target
        troubles: what happens, by host and number of its operation

    Attributes:
        hosts: their names; the first one leads
        failed: what uploaders could not do, in words
        lost: hosts that are gone, or have no folder any more
        operations: of each host
    """

    def __init__(
        self,
        folders: Mapping[str, Mapping[str, bytes]],
        atomic_rename: bool,
        troubles: Mapping[tuple[str, int], str] | None = None,
    ) -> None:
        self.simulation = Simulation(1)
        self.folders, self.hosts = folders, (*folders,)
        self.disks = {host: SimulatedFiles(_disk_of(files)) for host, files in folders.items()}
        self.target = SimulatedFiles(Disk(), atomic_rename=atomic_rename)
        self.target.make_folders(TARGET)
        self._troubles = dict(troubles or {})
        self._host_of = dict[SimulatedProcess, str]()
        self.processes = dict[str, SimulatedProcess]()
        self.operations, self.failed, self.lost = Counter[str](), list[str](), set[str]()
        self.done, self.happened = set[str](), list[str]()

    def run(self) -> bool:
        """Returns whether all has ended in time."""
        for host in self.hosts:
            self._start(host)
        watch = self.simulation.process("the run")
        watch.start(self._watch, watch)
        return self.simulation.run(LIMIT + 60.0)

    def _watch(self, watch: SimulatedProcess) -> None:
        """Start what was killed again, until all is done or time is over."""
        while self.simulation.now < LIMIT and not {*self.hosts} <= self.done | self.lost:
            watch.outside.sleep(_AGAIN_SECONDS)
            for host, process in [*self.processes.items()]:
                if process.is_dead and host not in self.done | self.lost:
                    self._start(host)
        for process in self.processes.values():
            if not process.is_dead:
                process.kill()

    def _start(self, host: str) -> None:
        process = self.simulation.process(f"uploader of {host}")
        turn = process.turn

        def operation() -> None:
            self.operation(process)
            turn()

        process.turn = operation  # type: ignore[method-assign]
        self.processes[host], self._host_of[process] = process, host
        process.start(self._upload, host, process)

    def _upload(self, host: str, process: SimulatedProcess) -> None:
        policy = self.policy_of(host)
        run = RunWatch(policy, HostFiles(process, self.disks[host]))
        run.newest = STEP
        run.ended.set()
        kind = Uploader if policy.leads else PartUploader

        def storage_of(path: str) -> HostFiles:
            return HostFiles(process, self.target if path == TARGET else self.disks[host])

        try:
            kind(policy, run, self._told, storage_of).run()
        except Exception as error:  # said to the run, as the process does before it ends
            self.failed.append(str(error))
        self.done.add(host)

    def _told(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            self.failed.append(message["error"])

    def policy_of(self, host: str) -> UploadPolicy:
        names = (self.hosts, host) if len(self.hosts) > 1 else ((), "")  # one alone has what all ranks share
        return UploadPolicy(
            SOURCE, TARGET, MEGATRON, RetentionPolicy(1), run=RUN, hosts=names[0], host=names[1], silent_seconds=SILENT
        )

    # What uploaders see

    def operation(self, process: SimulatedProcess) -> None:
        """Count an operation, and let happen what is to happen at it."""
        host = self._host_of[process]
        self.operations[host] += 1
        kind = self._troubles.pop((host, self.operations[host]), None)
        if kind is not None:
            self.happened.append(kind)
            TROUBLES[kind](self, host)

    # What must hold

    def violations(self, *, ended: bool) -> list[str]:
        """What must never be, and is."""
        found = scan_steps(self.target, TARGET, MEGATRON)
        wrong = [] if ended else ["an uploader hangs"]
        if {*self.happened} <= DELAYS.keys() and self.simulation.now > SOON + sum(
            DELAYS[kind] for kind in self.happened
        ):
            wrong.append(f"it took {self.simulation.now:.0f} s")
        wrong += [f"step {step}: {why}" for step, why in {**found.damaged, **found.torn, **found.unusable}.items()]
        for step in found.committed:
            wrong += self._wrong_in(step)
        others = {"another_run"} & {*self.happened}
        if not found.committed and not (self.lost or others):
            wrong.append(f"nothing was uploaded: {self.failed[-3:]}")
        if not found.committed and self.lost and not self.failed and self.hosts[0] not in self.lost:
            wrong.append("nothing was uploaded, and nobody has said so")
        return wrong

    def _wrong_in(self, step: int) -> Iterator[str]:
        path = f"{TARGET}/{MEGATRON.folder(step)}"
        folder = data_folder(self.target, path, read_manifest(self.target, path) or {})
        there = {name: self.target.read(f"{folder}/{name}", 1 << 30) for name in self.target.names(folder)}
        right = {
            os.path.basename(path): data
            for files in self.folders.values()
            for path, data in files.items()
            if MEGATRON.folder(step) in path and not path.endswith("manifest.json")
        }
        for name in ("manifest.json", "manifest.json.draft"):  # a commit that was cut off leaves its draft
            there.pop(name, None)
        if there.keys() != right.keys():
            yield f"step {step} has {sorted(there.keys() ^ right.keys())} too much, or not"
        yield from (f"step {step}: {name} is not what it was" for name in there if there[name] != right.get(name))


def _disk_of(files: Mapping[str, bytes]) -> Disk:
    made = SimulatedFiles(Disk())
    for path, data in files.items():
        made.make_folders(os.path.dirname(path))
        made.write_new(path, data)
    return copy.deepcopy(made.disk)


# What may happen to an uploader, or to its host


def kill(crew: Crew, host: str) -> None:
    crew.processes[host].kill()


def stop(crew: Crew, host: str) -> None:
    crew.processes[host].stop(2 * SILENT)


def lose_host(crew: Crew, host: str) -> None:
    crew.lost.add(host)
    crew.processes[host].kill()


def lose_folder(crew: Crew, host: str) -> None:
    """Its disk is empty now; its process goes on."""
    crew.lost.add(host)
    crew.disks[host].remove_tree(f"{SOURCE}/{MEGATRON.folder(STEP)}")


def say_what_is_not_so(crew: Crew, host: str) -> None:
    """It says that its files are there, and they are not, or short, or have other bytes. Not the one that commits."""
    if len(crew.hosts) == 1:
        return
    host = crew.hosts[1] if host == crew.hosts[0] else host
    manifest = read_manifest(crew.disks[crew.hosts[0]], f"{SOURCE}/{MEGATRON.folder(STEP)}") or {}
    target = f"{TARGET}/{MEGATRON.folder(STEP)}"
    attempt = new_attempt(crew.target, target, manifest["attempt"])
    path = note_path(attempt, manifest, host)
    if not is_called(attempt) or ((note := read_note(crew.target, path)) is not None and note.attempt):
        return  # nobody waits for it, or what it has said is right
    how = crew.simulation.random.choice(("nothing", "short", "other"))
    for entry in manifest["files"]:
        if entry["name"] in manifest["hosts"][host] and how != "nothing":
            file = os.path.join(attempt.staging, entry["name"])
            crew.target.write_over(file, b"?" * (5 if how == "short" else entry["size"]))
    write_note(crew.target, path, PartNote(attempt=attempt.token))


def take_over(crew: Crew, host: str) -> None:
    FencingToken(crew.target, TARGET, MEGATRON, "another run").acquire()


TROUBLES: Mapping[str, Callable[[Crew, str], None]] = {
    "kill": kill,
    "stop": stop,
    "host_lost": lose_host,
    "folder_lost": lose_folder,
    "lie": say_what_is_not_so,
    "another_run": take_over,
}
