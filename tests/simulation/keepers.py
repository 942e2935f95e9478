"""A simulated host with keepers: the product's own, on simulated connections, time and threads.

What runs is the real `SnapshotKeeper`, `KeeperWorker`, `KeptFiles`, `HostMemory` and `MemoryCaller`. Simulated are the
sockets between the processes, and which process a keeper is in.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import pytest

import ckpt_component.core.writing.keeper as keeper_module
import ckpt_component.managing.run_memory as run_memory
from ckpt_component.core.processes.framing import Channel
from ckpt_component.core.storage.memory.keeper_server import KeeperServer
from ckpt_component.core.storage.memory.keeper_sockets import split_root
from ckpt_component.core.storage.memory.keepers import Keeper, KeptFile, Piece
from ckpt_component.core.storage.memory.kept_files import KeptFiles
from ckpt_component.core.storage.memory.kept_runs import KeptRun, memory_of
from ckpt_component.core.writing.orphan_commit import UndecidedSave
from ckpt_component.core.writing.process import WriterConnection
from ckpt_component.testing.simulation import SimulatedProcess, Simulation

T = TypeVar("T")

#: How long a keeper may take to answer, as in the product.
ANSWER_SECONDS = 10.0
LEASE = 600.0
_POLL = 0.25


class KeeperFiles(KeptFiles):
    """What a keeper keeps; what it does itself with its files are operations of its process."""

    def __init__(self, keeper: HostKeeper) -> None:
        super().__init__(keeper.process.outside)
        self._keeper = keeper

    def listed(self, prefix: str) -> list[KeptFile]:
        self._keeper.works("list")
        return super().listed(prefix)

    def put(self, path: str, data: bytes, *, new: bool = True) -> None:
        self._keeper.works("put")
        self._keeper.host.refuse_full(path)
        super().put(path, data, new=new)

    def put_image(self, path: str, *place: Any) -> None:
        self._keeper.works("put_image")
        self._keeper.host.refuse_full(path)
        super().put_image(path, *place)

    def delete(self, paths: Sequence[str]) -> None:
        self._keeper.works("delete")
        super().delete(paths)


class HostKeeper:
    """A keeper's process.

    Args:
        host: where it runs
        trainer: whose snapshots it keeps
        root: path of the run's memory
        rank: of the trainer
        world_size: number of ranks

    Attributes:
        undecided: from when until when it had a save that was undecided when its trainer died; infinite: it still has
    """

    def __init__(self, host: Host, trainer: SimulatedProcess, root: str, rank: int, world_size: int) -> None:
        self.host, self.trainer, self.root, self.rank = host, trainer, root, rank
        self.undecided = list[tuple[float, float]]()
        self.place = split_root(root)
        self.token = root.rpartition("@")[2]
        self.process = host.simulation.process(f"keeper {rank} of {root.rpartition('@')[2]}")
        host.at(self.process)
        self.seen = KeeperProcess(self, trainer)
        self.holding = list[SimulatedProcess]()
        self._lanes = list[Any]()
        self.files = KeeperFiles(self)
        host.making = self
        self.snapshots = keeper_module.SnapshotKeeper("/runs/one", root, rank, world_size, LEASE, self.process.outside)
        self.snapshots.start()
        host.making = None
        self.process.outside.start("keeper", self._live)

    def serve(self, *arguments: Any, **named: Any) -> SimulatedServer:
        """In the place of `KeeperServer`."""
        self.server = SimulatedServer(self, *arguments, **named)
        return self.server

    def works(self, what: str) -> None:
        """An operation of this process, if it is the one that runs."""
        if self.host.in_simulation and self.host.simulation.current.process is self.process:
            self.host.operation(self.process, "keep")
            self.process.turn()

    def open_lane(self, trainer: SimulatedProcess) -> WriterConnection:
        """A connection on which the trainer's work is done."""
        wire = Wire(trainer, self)
        self._lanes.append(self.process.outside.start("lane", self._serve, wire))
        child = TrainersChild(self, trainer)
        connection = WriterConnection(cast(Any, child), cast(Channel, wire.end_of(trainer)))
        connection.expect_ready(10.0)
        return connection

    def _serve(self, wire: Wire) -> None:
        self.snapshots.work_for(cast(Channel, wire.end_of(self.process)))

    def _live(self) -> None:
        """The main thread: wait for the end of the trainer, and outlive it."""
        while not self.trainer.is_dead:
            self.process.outside.sleep(_POLL)
        for lane in self._lanes:
            lane.join(1e6)
        self.snapshots.outlive()
        self.snapshots.close()
        self.process.kill()


class OutlivingWorker(keeper_module.KeeperWorker):
    """Its process notes for how long a save is undecided after the trainer has died."""

    def outlive_trainer(self, undecided: UndecidedSave) -> None:
        process = cast(WireEnd, self._trainer).keeper
        began, simulation = len(process.undecided), process.host.simulation
        process.undecided.append((simulation.now, math.inf))
        super().outlive_trainer(undecided)
        process.undecided[began] = process.undecided[began][0], simulation.now


class SimulatedServer(KeeperServer):
    """The server of a keeper, which is found from the beginning by all processes of its host."""

    def __init__(self, keeper: HostKeeper, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._keeper = keeper

    @property
    def holders(self) -> int:
        return super().holders + sum(not client.is_dead for client in self._keeper.holding)

    def start(self) -> None:
        """Its socket is there from the beginning."""
        self._keeper.host.sockets_at(self._keeper.place)[self._keeper.rank] = self._keeper

    def close(self) -> None:
        """Remove the socket, if no successor has it."""
        sockets = self._keeper.host.sockets_at(self._keeper.place)
        if sockets.get(self._keeper.rank) is self._keeper:
            del sockets[self._keeper.rank]

    def tell(self) -> dict[str, Any]:
        """What clients are told of it."""
        return self._all_about()


class TrainersChild:
    """A keeper's process as its trainer sees it."""

    def __init__(self, keeper: HostKeeper, trainer: SimulatedProcess) -> None:
        self._keeper, self.outside = keeper, trainer.outside
        self.pid = os.getpid()

    @property
    def alive(self) -> bool:
        return not self._keeper.process.is_dead

    def kill(self) -> None:
        self._keeper.process.kill()

    def wait(self, seconds: float) -> int | None:
        return None if self.alive else -9


class KeeperProcess:
    """What `MemoryCaller` is connected to, as a `ByteProcess`."""

    def __init__(self, keeper: HostKeeper, trainer: SimulatedProcess) -> None:
        self.keeper = keeper
        self._trainer = trainer

    def open_lane(self, timeout: float) -> WriterConnection:
        return self.keeper.open_lane(self._trainer)


class Wire:
    """A socket pair between a trainer and its keeper."""

    def __init__(self, trainer: SimulatedProcess, keeper: HostKeeper) -> None:
        one, other = trainer, keeper.process
        self.keeper, self.copies = keeper, keeper.host.copies
        self.ends = {one: WireEnd(one, other, self), other: WireEnd(other, one, self)}

    def end_of(self, process: SimulatedProcess) -> WireEnd:
        return self.ends[process]


class WireEnd:
    """One end, with the methods of a `Channel`; the keeper's with those of a `ParentChannel`."""

    def __init__(self, process: SimulatedProcess, peer: SimulatedProcess, wire: Wire) -> None:
        self._process, self._peer, self._wire = process, peer, wire
        self.keeper, self.outside = wire.keeper, process.outside
        self._frames = list[tuple[str, bytes, list[int]]]()
        self._waiting: Any = None
        self._is_closed = False

    def send(
        self, header: Mapping[str, Any], deadline: float = 1e9, blobs: Sequence[Any] = (), fds: Sequence[int] = ()
    ) -> None:
        self._process.turn()
        other = self._wire.ends[self._peer]
        if self.hung_up:
            if self._process is self.keeper.process:
                return  # as of a `ParentChannel`
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        copies = [os.dup(fd) for fd in fds]
        self._wire.copies.extend((fd, os.fstat(fd).st_ino) for fd in copies)
        other._frames.append((json.dumps(header), b"".join(map(bytes, blobs)), copies))
        if other._waiting is not None:
            other._waiting.set()

    @property
    def hung_up(self) -> bool:
        return self._peer.is_dead or self._wire.ends[self._peer]._is_closed

    def receive(self, deadline: float = 1e9) -> Any:
        outside = self._process.outside
        self._process.turn()
        while not self._frames:
            if self.hung_up or self._is_closed:
                return None
            if outside.now() > deadline:
                raise TimeoutError
            self._waiting = outside.latch()
            self._waiting.wait(_POLL)
        text, blob, fds = self._frames.pop(0)
        return json.loads(text), memoryview(blob), fds

    def close(self) -> None:
        self._is_closed = True


class ReachedKeeper(Keeper):
    """A keeper over its socket, as a process sees it; in the place of `RemoteKeeper`."""

    def __init__(self, keeper: HostKeeper, process: SimulatedProcess) -> None:
        self.keeper, self._process = keeper, process

    @property
    def rank(self) -> int:
        return self.keeper.rank

    def listed(self, prefix: str) -> list[KeptFile]:
        return self._asked(lambda: KeptFiles.listed(self.keeper.files, prefix))

    def get(self, path: str, limit: int) -> bytes:
        return self._asked(lambda: KeptFiles.get(self.keeper.files, path, limit))

    def put(self, path: str, data: bytes, *, new: bool = True) -> None:
        def effect() -> None:
            self.keeper.host.refuse_full(path)
            KeptFiles.put(self.keeper.files, path, data, new=new)

        self._asked(effect)

    def delete(self, paths: Sequence[str]) -> None:
        self._asked(lambda: KeptFiles.delete(self.keeper.files, paths))

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[Mapping[str, Piece | bytes]]:
        with contextlib.ExitStack() as stack:
            yield self._asked(lambda: stack.enter_context(self.keeper.files.opened(folder)))

    def about(self) -> dict[str, Any]:
        return self._asked(self.keeper.server.tell)

    def hold(self) -> None:
        self._asked(lambda: self.keeper.holding.append(self._process))

    def end(self) -> None:
        self._asked(self.keeper.server.ended.set)

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            self.keeper.holding.remove(self._process)

    def _asked(self, effect: Callable[[], T]) -> T:
        """A request and its answer."""
        host, process, keeper = self.keeper.host, self._process, self.keeper.process
        if not host.in_simulation:  # a thread that reads; it has what it reads from
            return effect()
        host.operation(process, "")
        process.turn()
        until = host.simulation.now + ANSWER_SECONDS
        while host.simulation.now < keeper.stopped_until and not keeper.is_dead:
            if host.simulation.now >= until:
                raise TimeoutError(errno.ETIMEDOUT, f"{keeper.name} has not answered for {ANSWER_SECONDS:g} s")
            host.simulation.park(min(keeper.stopped_until, until))
        if keeper.is_dead:
            raise self._gone()
        answer = effect()
        process.turn()
        if keeper.is_dead:
            raise self._gone()
        return answer

    def _gone(self) -> ConnectionError:
        return ConnectionResetError(errno.ECONNRESET, f"{self.keeper.process.name} has ended")


class Host:
    """The keepers of one host.

    Args:
        simulation: where it is
        operation: called before each operation, with the process that does it and what it does; "": its usual work

    Attributes:
        keepers: all that there were
        sockets: of a run, by rank; that of a keeper that was killed stays until a process connects to it
        copies: descriptors that were passed on, each with its inode
        full_until: until when there is no memory left
        belongs_to_another: whether the folder of the sockets is another user's
    """

    def __init__(self, simulation: Simulation, operation: Callable[[SimulatedProcess, str], None]) -> None:
        self.simulation = simulation
        self.operation = operation
        self.keepers = list[HostKeeper]()
        self.sockets = dict[tuple[str, ...] | None, dict[int, HostKeeper]]()
        self.making: HostKeeper | None = None
        self.copies = list[tuple[int, int]]()
        self.full_until = 0.0
        self.belongs_to_another = False
        self._thread = threading.get_ident()

    def at(self, process: SimulatedProcess) -> None:
        """A process is on this host."""

    @property
    def in_simulation(self) -> bool:
        """Whether this is the thread of the simulation, and none of a reader."""
        return threading.get_ident() == self._thread

    def sockets_at(self, place: tuple[str, ...] | None) -> dict[int, HostKeeper]:
        return self.sockets.setdefault(place, {})

    def living(self) -> list[HostKeeper]:
        return [keeper for keeper in self.keepers if not keeper.process.is_dead]

    def keeper_of(self, trainer: SimulatedProcess, root: str, rank: int, world_size: int) -> KeeperProcess:
        """The keeper of a trainer, which is started if there is none."""
        for keeper in self.living():
            if keeper.trainer is trainer:
                return keeper.seen
        self.keepers.append(HostKeeper(self, trainer, root, rank, world_size))
        return self.keepers[-1].seen

    def find(self, process: SimulatedProcess, besides: HostKeeper | None = None) -> Callable[[str], list[Keeper]]:
        """Finds the keepers of a run for a process."""

        def found(path: str) -> list[Keeper]:
            if self.in_simulation:
                self._look(process)
            sockets = self.sockets_at(split_root(path))
            for rank, keeper in [*sockets.items()]:
                if keeper.process.is_dead:
                    del sockets[rank]
            return [ReachedKeeper(each, process) for _, each in sorted(sockets.items()) if each is not besides]

        return found

    def _look(self, process: SimulatedProcess) -> None:
        self.operation(process, "")
        process.turn()
        if self.belongs_to_another:
            raise PermissionError(errno.EACCES, "the folder of the sockets belongs to user 12, not to user 7")

    def keepers_at(self, path: str) -> list[Keeper]:
        """In the place of `keepers_of`."""
        return self.find(self.simulation.current.process)(path)

    @property
    def tokens(self) -> list[str]:
        """Of all runs that have keepers, or had, the last one first: the lineage of the folder."""
        return [*dict.fromkeys(keeper.token for keeper in reversed(self.keepers))]

    def kept_run(self, token: str) -> KeptRun | None:
        """In the place of the function `kept_run`."""
        process = self.simulation.current.process
        self._look(process)
        for keeper in sorted(self.living(), key=lambda each: each.rank):
            if keeper.token == token:
                with contextlib.suppress(ConnectionError):
                    about = ReachedKeeper(keeper, process).about()
                    return KeptRun(token, memory_of(token, about), about["root"])
        return None

    def refuse_full(self, path: str) -> None:
        if self.simulation.now < self.full_until:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), path)

    def clear(self, arenas: set[int]) -> None:
        """Free what the processes held, all of which have ended; `arenas` are descriptors of the trainers'."""
        for keeper in self.keepers:
            KeptFiles.delete(keeper.files, [file.path for file in KeptFiles.listed(keeper.files, "")])
        for fd, inode in {*self.copies}:
            with contextlib.suppress(OSError):  # closed by its receiver
                if fd not in arenas and os.fstat(fd).st_ino == inode:
                    os.close(fd)


class HostPatches:
    """While it is entered, the keeper's module has the simulated parts of the `Host` that is set."""

    def __init__(self) -> None:
        self.host: Host | None = None
        self._patch = pytest.MonkeyPatch()

    def use(self, host: Host) -> None:
        self.host = host

    def __enter__(self) -> HostPatches:
        patch = self._patch
        patch.setattr(keeper_module, "KeptFiles", lambda outside: self._made().files)
        patch.setattr(keeper_module, "HostKeepers", lambda besides, outside: self._find())
        patch.setattr(keeper_module, "KeeperWorker", OutlivingWorker)
        patch.setattr(keeper_module, "KeeperServer", lambda *args, **named: self._made().serve(*args, **named))
        patch.setattr(run_memory, "keepers_of", lambda path, outside: self._set().keepers_at(path))
        patch.setattr(run_memory, "tokens_at", lambda root, outside: self._set().tokens)
        patch.setattr(run_memory, "kept_run", lambda token, outside: self._set().kept_run(token))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _set(self) -> Host:
        assert self.host is not None
        return self.host

    def _running(self) -> SimulatedProcess:
        """The process that runs; or the keeper that it is making, whose threads are its own."""
        host = self._set()
        return host.simulation.current.process if host.making is None else host.making.process

    def _made(self) -> HostKeeper:
        made = self._set().making
        assert made is not None
        return made

    def _find(self) -> Callable[[str], list[Keeper]]:
        made = self._made()
        return self._set().find(made.process, besides=made)
