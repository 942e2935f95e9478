"""A host that serves published weights, on a simulated disk: its receiver, and those who read what it has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ckpt_component.errors import CheckpointError
from ckpt_component.publishing.local_copy import Pulled
from ckpt_component.publishing.receiver import Receiver
from ckpt_component.testing import Disk, DiskFile, DiskFolder
from ckpt_component.testing.machine import Machine, MachineFiles

from .published_versions import STATE, files_in, weights_in
from .publishing import TO, Publishing, storage_of
from .trained import described

FOLDER = "/serving/weights"
#: What a receiver may do at its source.
READS = {"get", "head", "list"}


class Over(Exception):
    """What was to happen has happened."""


@dataclass
class Serving:
    """A folder of weights, and who reads it.

    Attributes:
        publishing: where its versions come from
        disk: of the host
        held: what readers have open: the files, their bytes when they were opened
        wrong: what a reader saw, and must never be
        number: of the version that was seen last; 0: none
        goes_back: whether an older version may take the place of a newer one
    """

    publishing: Publishing
    disk: Disk = field(default_factory=Disk)
    held: list[tuple[DiskFile, bytes]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    number: int = 0
    goes_back: bool = False
    #: What was there at the last look.
    _last: Mapping[str, bytes] | None = None

    def again(self) -> Serving:
        """The same on a disk of its own, without readers."""
        return Serving(self.publishing, copy.deepcopy(self.disk), number=self.number)

    # What readers see

    def look(self) -> None:
        """A reader looks at the folder: it has one version, whole, and a later one each time."""
        try:
            self.wrong += self._seen()
        except (AssertionError, LookupError, ValueError) as error:
            self.wrong.append(f"the folder cannot be read: {error!r}")
        for file, data in self.held:
            if bytes(file.data) != data:
                self.wrong.append("a file changed under a reader")

    def _seen(self) -> Iterator[str]:
        files = files_in(self.disk, FOLDER)
        if files == self._last and self.number:
            return
        self._last = {**files}
        if STATE not in files:
            if files or self.number:
                yield f"the folder has no state, and {sorted(files)}; it was at version {self.number}"
            return
        state = described(files.pop(STATE))
        number, before = state["version"], self.number
        # A version that was not reported may be taken back, when its commit was not seen to be durable.
        if number < before in self.publishing.told and not self.goes_back:
            yield f"the folder is at version {number} after {before}"
        self.number = number
        if weights_in(files) != self.publishing.weights(state["step"]):
            yield f"the folder says version {number}, and has other weights than step {state['step']}"
        if self.publishing.shown.get(number, state["attempt"]) != state["attempt"]:
            yield f"the folder says version {number}, and has another attempt"

    def open_all(self) -> None:
        """A reader opens the files of the folder, until `close_all`."""
        folder = self.disk.folder(FOLDER)
        self.held += [(file, bytes(file.data)) for file in folder.entries.values() if isinstance(file, DiskFile)]

    def close_all(self) -> None:
        self.held.clear()

    # The receiver

    def machine(self, **arguments: Any) -> Machine:
        """A process on this host, after each of whose operations a reader looks."""
        machine = Machine(**arguments)
        machine.done = self.look
        return machine

    @contextmanager
    def receiver(self, machine: Machine, folder: str = FOLDER, fs: MachineFiles | None = None) -> Iterator[Receiver]:
        """A receiver. It has no right to change the source, and its process holds no more than it says."""
        fs = ServingFiles(machine, self) if fs is None else fs
        source = storage_of(machine, self.publishing.target, self.publishing.kind)
        with Receiver(TO, folder, storage_of=lambda path: source if path == TO else fs) as receiver:
            yield receiver
        changes = [each for each in machine.operations if each[1].startswith(TO) and each[0] not in READS]
        self.wrong += [f"a receiver changed its source: {changes}"] * bool(changes)

    def pull(self, machine: Machine | None = None, number: int | None = None) -> Pulled | None:
        machine = machine or self.machine()
        with self.receiver(machine) as receiver:
            pulled = receiver.pull(number)
        self.look()
        return pulled

    def follow(self, events: Iterable[Callable[[], object]], machine: Machine | None = None) -> list[Pulled]:
        """Follow the source; whenever the receiver pauses, the next event happens. Returns what it pulled."""
        machine, left = machine or self.machine(), iter(events)

        def slept(seconds: float) -> None:
            event = next(left, None)
            if event is None:
                raise Over
            event()

        machine.outside.slept = slept
        pulled: list[Pulled] = []
        try:
            with self.receiver(machine) as receiver:
                for each in receiver.follow():
                    pulled.append(each)
                    self.look()
        except Over:
            pass
        self.look()
        return pulled

    def catches_up(self) -> Iterator[str]:
        """The next life of the receiver: what is wrong with what it comes to."""
        self.disk.now += 600.0
        newest = max(self.publishing.versions(), default=0)
        try:
            self.pull()
        except (CheckpointError, OSError) as error:
            yield f"the next receiver: {type(error).__name__}: {error}"
        if newest and self.number != newest:
            yield f"the folder is at {self.number}, and the newest version is {newest}"
        names = [*self.disk.folder("/serving").entries]
        if set(names) - {"weights", ".ckpt-pull.weights"}:
            yield f"left behind: {names}"
        work = self.disk.find("/serving/.ckpt-pull.weights")
        if isinstance(work, DiskFolder) and work.entries:
            yield f"left behind: {sorted(work.entries)}"
        yield from self.wrong


class ServingFiles(MachineFiles):
    """The disk of the host, as its receiver sees it."""

    def __init__(self, machine: Machine, serving: Serving) -> None:
        super().__init__(machine, serving.disk)
        self._serving = serving

    def is_open_elsewhere(self, path: str) -> bool:
        return super().is_open_elsewhere(path) or any(self.disk.file(path) is file for file, _ in self._serving.held)
