"""Two servers as on two hosts, in processes of their own: one sends its snapshot, the other takes it.

The same two processes also move as many bytes over a plain TCP connection, to compare with.
"""

from __future__ import annotations

import os
import socket
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ckpt_component.core.memory.huge_pages import SharedPages, align
from ckpt_component.core.storage.checksum import fastest
from ckpt_component.hosts.keep import CopyTaker, send_copy
from ckpt_component.hosts.server import PeerEndpoint, SnapshotServer
from ckpt_component.hosts.stores import FileSums, MemoryStore
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
        self._taker = SpawnedProcess(_serve_taker, sum(map(align, items)), seconds=_SECONDS)
        self._sender = SpawnedProcess(_serve_sender, items, seconds=_SECONDS)
        self._number = 0

    def __enter__(self) -> SnapshotStorePair:
        self._sender.ask("connect", *self._taker.ask("ports"))
        return self

    def __exit__(self, *_: object) -> None:
        self._sender.close()
        self._taker.close()

    def stream(self) -> Moved:
        """Over one plain TCP connection, from memory to memory that is there."""
        return self._moved("stream")

    def copy(self) -> Moved:
        """As a snapshot that a server copies to its peer; the one before it is dropped after that, on both sides."""
        self._number += 1
        moved = self._moved("copy", self._number)
        self._taker.ask("drop", self._number - 1)
        return moved

    def stay_on(self, cores: Collection[int]) -> None:
        """Have both run on these cores alone."""
        for process in (self._sender, self._taker):
            process.ask("stay", [*cores])

    def _moved(self, what: str, *arguments: Any) -> Moved:
        before = self._cpu()
        if what == "stream":
            self._taker.begin("receive")
        seconds = self._sender.ask(what, *arguments)
        if what == "stream":
            self._taker.answer()
        return Moved(seconds, self._cpu() - before)

    def _cpu(self) -> float:
        return float(self._sender.ask("cpu")) + float(self._taker.ask("cpu"))


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


def _serve_taker(pipe: Connection, nbytes: int) -> None:
    os.nice(_NICE)
    files, endpoint = MemoryStore(), PeerEndpoint(_HOST, _SECRET)
    taker = CopyTaker(files, _ROOT, "the peer", lambda: None)
    server = SnapshotServer(files, _ROOT, 1, dict, taker.take)
    server.open(endpoint)
    listener = socket.create_server((_HOST, 0))
    memory, connections = _memory(nbytes).memory, list[socket.socket]()

    def receive() -> None:
        connection = connections[0] if connections else listener.accept()[0]
        connections[:] = [connection]
        position = 0
        while position < nbytes:
            position += connection.recv_into(memory[position : position + _RECEIVED_BYTES])
        connection.sendall(b".")

    def drop(number: int) -> None:
        files.delete([file.path for file in files.listed(_step(number))])

    _serve(
        pipe,
        {
            "ports": lambda: (endpoint.port, listener.getsockname()[1]),
            "receive": receive,
            "drop": drop,
        },
    )
    server.close()


def _serve_sender(pipe: Connection, items: Sequence[int]) -> None:
    os.nice(_NICE)
    nbytes = sum(map(align, items))
    image, checksum, connections = _memory(nbytes), fastest(), list[Any]()
    places, position = array("Q"), 0
    for item in items:
        places.extend((position, item))
        position += align(item)
    values = array(
        "Q", [checksum.of(image.memory[at : at + item]) for at, item in zip(places[::2], items, strict=True)]
    )
    sums = FileSums(checksum.name, places, values)
    files = MemoryStore()

    def connect(peer_port: int, port: int) -> None:
        connections[:] = [PeerAddress("the peer's host", _HOST, peer_port, 1), socket.create_connection((_HOST, port))]

    def stream() -> float:
        started, sent, connection = time.perf_counter(), 0, connections[1]
        while sent < nbytes:
            sent += os.sendfile(connection.fileno(), image.fd, sent, min(_SENT_BYTES, nbytes - sent))
        connection.recv(1)
        return time.perf_counter() - started

    def copy(number: int) -> float:
        files.put_image(f"{_step(number)}/data", number, image.fd, 0, nbytes, b"", sums)
        started = time.perf_counter()
        send_copy(files, 0, _step(number), connections[0], _SECRET, None, time.monotonic() + _SECONDS)
        seconds = time.perf_counter() - started
        files.delete([file.path for file in files.listed("")])
        return seconds

    _serve(pipe, {"connect": connect, "stream": stream, "copy": copy})


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
