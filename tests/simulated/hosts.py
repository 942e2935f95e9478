"""`SimulatedHosts`: a simulation whose processes connect to each other, launch others, and use simulated storages."""

from __future__ import annotations

import contextlib
import importlib
import math
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, cast

from ckpt_component.core.options import IoPriority
from ckpt_component.core.outside import HOST_VARIABLE, Outside, Socket
from ckpt_component.testing.simulation import (
    Killed,
    SimulatedLatch,
    SimulatedOutside,
    SimulatedProcess,
    SimulatedThread,
    Simulation,
)

from .connections import SimulatedNetwork
from .sockets import SimulatedSocket, SimulatedSockets

_RUNTIME_VARIABLE = "CKPT_RUNTIME_DIR"


class SimulatedHosts(Simulation):
    """See the top of this file.

    Attributes:
        network: between the hosts
        free_memory: how many bytes of memory a host has left
        storage_of: returns what a process sees of the storage of a path; None: storages are not simulated
    """

    def __init__(self, seed: int, quickest: float = 1e-4, slowest: float = 1e-2) -> None:
        super().__init__(seed, quickest, slowest)
        self.network = SimulatedNetwork(self)
        self.free_memory: Callable[[str], int] = lambda host: 1 << 40
        self.storage_of: Callable[[HostProcess, str], Any] | None = None
        self.interrupted = set[SimulatedThread]()

    def process(self, name: str, host: str = "host", parent: SimulatedProcess | None = None) -> HostProcess:
        """See the base class."""
        return HostProcess(self, name, host, parent)

    def forget(self) -> None:
        """Drop all processes, and what they have open: finalizers keep queues and sockets, which refer to them."""
        for process in self.processes:
            cast(HostProcess, process).handlers.clear()
            vars(process.outside).pop("waits", None)  # they refer to recorders
        self.processes.clear()
        self.network.forget()
        self.storage_of, self.free_memory = None, lambda host: 1 << 40

    @cached_property
    def folder(self) -> str:
        """A real folder, for files that stand for the sockets of all hosts; it is deleted with this object."""
        path = tempfile.mkdtemp(prefix="ckpt-simulation-")
        weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        return path

    def run(self, limit: float) -> bool:
        """See the base class."""
        try:
            return super().run(limit)
        finally:
            if "folder" in vars(self):  # it was made
                shutil.rmtree(self.folder, ignore_errors=True)

    def park(self, until: float = math.inf) -> None:
        """See the base class. Raises SystemExit, where a thread is interrupted."""
        super().park(until)
        if self.current in self.interrupted:
            self.interrupted.remove(self.current)
            raise SystemExit(1)


class HostProcess(SimulatedProcess):
    """A process of a host.

    Attributes:
        exit_code: how it has ended, as `subprocess` says it; None: it runs
        ended: set when it has ended
        sockets: those that it has open
        inherited: its connection to its parent, if `Outside.launch` has started it
        handlers: what it does when a signal comes
    """

    simulation: SimulatedHosts
    outside: HostOutside

    def __init__(
        self, simulation: SimulatedHosts, name: str, host: str, parent: SimulatedProcess | None = None
    ) -> None:
        super().__init__(simulation, name, host, parent)
        self.exit_code: int | None = None
        self.ended = SimulatedLatch(simulation)
        self.sockets = dict[SimulatedSocket, None]()
        self.inherited: SimulatedSocket | None = None
        self.handlers = dict[int, Callable[[], None] | None]()

    def make_outside(self) -> HostOutside:
        """See the base class."""
        return HostOutside(self)

    @cached_property
    def environment(self) -> dict[str, str]:
        """See the base class; its own runtime folder is that of the simulation."""
        return {HOST_VARIABLE: self.host, _RUNTIME_VARIABLE: self.simulation.folder}

    def launch(self, main: Callable[[Outside], None]) -> None:
        """Run the `main` of a program as its main thread; the process ends with it."""
        SimulatedThread(self, self._run, (main,))

    def _run(self, main: Callable[[Outside], None]) -> None:
        code = 1
        try:
            main(self.outside)
            code = 0
        except Killed:
            raise
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        finally:
            self.end(code)

    def signal(self, number: int) -> None:
        """Send it a signal, which kills it if it does not handle it."""
        if number not in self.handlers:
            self.kill(number)
        elif (action := self.handlers[number]) is not None and not self.is_dead:
            SimulatedThread(self, action, ())

    def end(self, code: int = 0) -> None:
        """See the base class."""
        if not self.is_dead:
            super().end(code)
            self.exit_code = code
            for sock in self.sockets:
                sock.end.wake_both()
            self.ended.set()


class SimulatedChild:
    """A process that another one has launched."""

    def __init__(self, process: HostProcess) -> None:
        self.process, self.pid = process, process.pid

    def poll(self) -> int | None:
        """How it has ended; None: it runs."""
        return self.process.exit_code

    def wait(self, seconds: float) -> int | None:
        """Wait for its end, at most so many simulated seconds; returns as `poll`."""
        self.process.ended.wait(seconds)
        return self.process.exit_code

    def kill(self) -> None:
        """End it at once."""
        if not self.process.is_dead:
            self.process.kill()

    def lines(self) -> Iterator[bytes]:
        """It prints nothing; waits for its end."""
        self.process.ended.wait(math.inf)
        return iter(())

    def leave(self) -> None:
        """Let it live on by itself."""


class HostOutside(SimulatedSockets, SimulatedOutside):
    """What a process of a host runs in."""

    process: HostProcess

    @property
    def storage_of(self) -> Callable[[str], Any] | None:  # type: ignore[override]
        """The storages of the simulation, as the process sees them."""
        storage_of = self.process.simulation.storage_of
        return None if storage_of is None else partial(storage_of, self.process)

    def free_memory(self) -> int:
        """That of the host, as the simulation has it."""
        return self.process.simulation.free_memory(self.process.host)

    def launch(
        self,
        module: str,
        connection: Socket,
        *,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        own_session: bool = False,
        reads_output: bool = False,
    ) -> SimulatedChild:
        """Run `main` of a module in a new process of this host."""
        parent = self.process
        name = f"{module.rpartition('.')[2]} of {parent.name}"
        child = parent.simulation.process(name, parent.host, parent)
        child.environment = {**self.environment, **(environment or {})}
        child.inherited = self.of(connection).copied_to(child)
        child.launch(importlib.import_module(module).main)
        return SimulatedChild(child)

    def lower_priority(self, pid: int, nice: int, io_priority: IoPriority) -> None:
        """All processes have the same."""

    def inherited(self) -> SimulatedSocket:
        """The connection to who has launched this process."""
        inherited = self.process.inherited
        assert inherited is not None, "no process has launched it"
        return inherited

    def on_signal(self, number: int, action: Callable[[], None] | None) -> None:
        """Call this when `HostProcess.signal` sends a signal."""
        self.process.handlers[number] = action

    def exit(self) -> None:
        """End it as with the simulation."""
        self.process.end()
        raise Killed

    def leave_folder(self) -> None:
        """It is in none."""

    def be_silent(self) -> None:
        """It prints nothing."""

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[Callable[[], None]]:
        """While entered, another thread may end this one."""
        simulation, entered = self.process.simulation, [self.process.simulation.current]

        def interrupt() -> None:
            for thread in entered:
                simulation.interrupted.add(thread)
                simulation.resume(thread, simulation.now)

        try:
            yield interrupt
        finally:
            simulation.interrupted.discard(entered.pop())
