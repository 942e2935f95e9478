"""Two servers as on two hosts, in processes of their own: one has a snapshot, and the other pulls it.

The same two processes also move as many bytes over a plain TCP connection, to compare with.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ckpt_component.core.available_memory import available_bytes
from ckpt_component.core.commit.names import integrity_name
from ckpt_component.core.pages import SharedPages, align
from ckpt_component.core.storage.checksum import fastest
from ckpt_component.hosts.peer_client import ReplicaMemory, ReplicaPull
from ckpt_component.hosts.server import PeerEndpoint, SnapshotServer
from ckpt_component.hosts.stores import MemoryStore
from ckpt_component.hosts.wire import PeerAddress, memory_root

from ..spawned_process import SpawnedProcess

_HOST = "127.0.0.1"
_SECONDS = 300.0
_ROOT = memory_root("/runs/bench", "1f2e3d4c-0a0b0c0d")
_SECRET = "of the benchmark"
#: As `checkpoint.caller.nice` has it.
_NICE = 10
_THREADS = 2
_SENT_BYTES, _RECEIVED_BYTES = 4 << 20, 1 << 20
#: What a process can be asked to do, by name.
_Acts = Mapping[str, Callable[..., Any]]


class Moved(NamedTuple):
    """What it took to move all bytes once.

    Attributes:
        seconds: until the other side had all of them
        cpu_s: CPU time of both processes
    """

    seconds: float
    cpu_s: float


class SnapshotStorePair:
    """Both processes. A context manager.

    Args:
        items: bytes of each tensor of the snapshot
    """

    def __init__(self, items: Sequence[int]) -> None:
        self._holder = SpawnedProcess(_serve_holder, sum(map(align, items)), seconds=_SECONDS)
        self._home = SpawnedProcess(_serve_home, items, seconds=_SECONDS)
        self._number = 0

    def __enter__(self) -> SnapshotStorePair:
        self._home.ask("connect", self._holder.ask("port"))
        self._holder.ask("connect", self._home.ask("port"))
        return self

    def __exit__(self, *_: object) -> None:
        self._home.close()
        self._holder.close()

    def stream(self) -> Moved:
        """Over one plain TCP connection, from memory to memory that is there."""
        before = self._cpu()
        self._holder.begin("receive")
        seconds = self._home.ask("stream")
        self._holder.answer()
        return Moved(seconds, self._cpu() - before)

    def copy(self) -> Moved:
        """As a snapshot that a peer pulls; the one before it is dropped after that, on both sides."""
        self._number += 1
        self._home.ask("keep", self._number)
        before = self._cpu()
        seconds = self._holder.ask("pull", self._number)
        moved = Moved(seconds, self._cpu() - before)
        for process in (self._home, self._holder):
            process.ask("drop", self._number - 1)
        return moved

    def stay_on(self, cores: Collection[int]) -> None:
        """Have both run on these cores alone."""
        for process in (self._home, self._holder):
            process.ask("stay", [*cores])

    def _cpu(self) -> float:
        return float(self._home.ask("cpu")) + float(self._holder.ask("cpu"))


def _serve(pipe: Connection, acts: _Acts) -> None:
    """Do what is asked, until the pipe is closed."""
    acts = {**acts, "cpu": time.process_time, "stay": _stay_on}
    while True:
        try:
            what, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(acts[what](*arguments))
        except Exception as error:
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _stay_on(cores: Collection[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def _serve_holder(pipe: Connection, nbytes: int) -> None:
    os.nice(_NICE)
    files, homes = MemoryStore(), list[PeerAddress]()
    replicas = ReplicaMemory(files, "the holder", available_bytes)
    listener = socket.create_server((_HOST, 0))
    memory, connections = _memory(nbytes).memory, list[socket.socket]()

    def receive() -> None:
        connection = connections[0] if connections else listener.accept()[0]
        connections[:] = [connection]
        position = 0
        while position < nbytes:
            position += connection.recv_into(memory[position : position + _RECEIVED_BYTES])
        connection.sendall(b".")

    def pull(number: int) -> float:
        started = time.perf_counter()
        ReplicaPull(replicas, homes[0], _SECRET, None, time.monotonic() + _SECONDS).pull(_step(number))
        return time.perf_counter() - started

    _serve(
        pipe,
        {
            "port": lambda: listener.getsockname()[1],
            "connect": lambda port: homes.append(PeerAddress("the home's host", _HOST, port, 0)),
            "receive": receive,
            "pull": pull,
            "drop": lambda number: files.delete([file.path for file in files.listed(_step(number))]),
        },
    )


def _serve_home(pipe: Connection, items: Sequence[int]) -> None:
    os.nice(_NICE)
    nbytes = sum(map(align, items))
    image, connections = _memory(nbytes), list[socket.socket]()
    index = _index(image.memory, items)
    files, endpoint = MemoryStore(), PeerEndpoint(_HOST, _SECRET)
    server = SnapshotServer(files, _ROOT, 0, dict)
    server.open(endpoint)

    def stream() -> float:
        started, sent, connection = time.perf_counter(), 0, connections[0]
        while sent < nbytes:
            sent += os.sendfile(connection.fileno(), image.fd, sent, min(_SENT_BYTES, nbytes - sent))
        connection.recv(1)
        return time.perf_counter() - started

    def keep(number: int) -> None:
        files.put_image(f"{_step(number)}/data", number, image.fd, 0, nbytes)
        files.put(f"{_step(number)}/{integrity_name(0)}", index)

    _serve(
        pipe,
        {
            "port": lambda: endpoint.port,
            "connect": lambda port: connections.append(socket.create_connection((_HOST, port))),
            "stream": stream,
            "keep": keep,
            "drop": lambda number: files.delete([file.path for file in files.listed(_step(number))]),
        },
    )
    server.close()


def _index(image: memoryview, items: Sequence[int]) -> bytes:
    """The integrity file of the image, whose items begin at pages."""
    checksum, rows, sums, position = fastest(), list[Any](), list[int](), 0
    for item in items:
        rows.append([0, position, item, position, "uint8", [item]])
        sums.append(checksum.of(image[position : position + item]))
        position += align(item)
    files, layout = [{"name": "data", "size": position}], {"files": ["data"], "items": rows}
    return json.dumps(
        {"files": files, "layout": layout, "extras": [], "checksum": checksum.name, "sums": sums}
    ).encode()


def _step(number: int) -> str:
    return f"{_ROOT}/iter_{number}"


def _memory(nbytes: int) -> SharedPages:
    """Memory that is there, with something in it."""
    pages = SharedPages(nbytes)
    pages.allocate(_THREADS)
    block = os.urandom(1 << 20)
    for start in range(0, nbytes, len(block)):
        part = pages.memory[start : start + len(block)]
        part[:] = block[: part.nbytes]
    return pages
