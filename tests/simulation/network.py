"""A simulated network between hosts: sockets of TCP, over links that can be cut, slow, or flip a bit.

It stands for the modules `socket` and `select`, and for `os.sendfile`, where the product talks to other hosts. A host
that is lost says nothing any more; a process that was killed hangs up.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpt_component.testing.simulation import SimulatedProcess, Simulation

#: Bytes that are on their way at most, and in one packet.
WINDOW, PACKET = 4096, 2048
#: A connection ends when nothing was confirmed for so long.
UNCONFIRMED = 30.0
_LATENCY, _POLL = 1e-4, 0.5
#: Numbers of sockets, in the place of descriptors.
_FIRST_NUMBER = 1 << 24


@dataclass
class Link:
    """The way between two hosts, in both directions.

    Attributes:
        cuts: from when until when nothing arrives
        slow_until: until when so few bytes pass in a second
        slow_rate: how many
        flips: how many packets have a bit flipped next
        flips_from: of how many bytes at least
    """

    cuts: list[tuple[float, float]] = field(default_factory=list)
    slow_until: float = 0.0
    slow_rate: float = 200.0
    flips: int = 0
    flips_from: int = 1

    def is_cut(self, now: float) -> bool:
        return any(start <= now < end for start, end in self.cuts)

    def heals(self, now: float) -> float:
        """When what is sent now may arrive."""
        return max([now, *(end for start, end in self.cuts if start <= now < end)])

    def has_ended(self, since: float, now: float) -> bool:
        """Whether a connection that was made then is given up."""
        return any(min(end, now) - max(start, since) >= UNCONFIRMED for start, end in self.cuts)


class Network:
    """All hosts, and what listens on them.

    Args:
        simulation: where it is
        operation: called before each operation of a process on a socket, and told whose connection it is
    """

    def __init__(self, simulation: Simulation, operation: Callable[[SimulatedProcess, SimulatedProcess], None]) -> None:
        self.simulation = simulation
        self.operation = operation
        self.host_of = dict[SimulatedProcess, str]()
        self.listeners = dict[tuple[str, int], SimulatedListener]()
        self.sockets = dict[int, SimulatedSocket]()
        #: Places that listeners of other processes have now.
        self.takes_over = dict[tuple[str, int], SimulatedProcess]()
        self.lost = set[str]()
        #: When a bit was flipped.
        self.flipped = list[float]()
        self._links = dict[frozenset[str], Link]()
        self._port = 20_000

    def link(self, one: str, other: str) -> Link:
        hosts = frozenset((one, other))
        if hosts not in self._links:
            cuts = [(self.simulation.now, 1e12)] if hosts & self.lost else []
            self._links[hosts] = Link(cuts)
        return self._links[hosts]

    def lose(self, host: str) -> None:
        """Let a host be gone, with its processes."""
        self.lost.add(host)
        now = self.simulation.now
        for hosts, link in self._links.items():
            if host in hosts:
                link.cuts.append((now, 1e12))
        for process, name in [*self.host_of.items()]:
            if name == host and not process.is_dead:
                process.kill()

    @property
    def running(self) -> SimulatedProcess:
        return self.simulation.current.process

    def address_of(self, host: str) -> str:
        return f"10.9.{sum(host.encode()) % 250}.{len(host)}"

    # In the place of the module `socket`

    def getaddrinfo(self, address: str, *_: Any, **options: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0))]

    def create_server(self, place: tuple[str, int], **options: Any) -> SimulatedListener:
        self._port += 1
        listener = SimulatedListener(self, self.running, (place[0], self._port))
        self.listeners[listener.place] = listener
        return listener

    def create_connection(self, place: tuple[str, int], timeout: float) -> SimulatedSocket:
        process, simulation = self.running, self.simulation
        self.operation(process, process)
        process.turn()
        listener, until = self.listeners.get(place), simulation.now + timeout
        if (owner := self.takes_over.get(place)) is not None:
            listener = next((each for each in self.listeners.values() if each.process is owner), None)
        here = self.host_of[process]
        there = "" if listener is None else self.host_of[listener.process]
        link = self.link(here, there)
        while link.is_cut(simulation.now):
            if simulation.now >= until:
                raise TimeoutError("timed out (simulated)")
            simulation.park(min(until, link.heals(simulation.now)))
        if listener is None or listener.is_closed or listener.process.is_dead:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        ours = SimulatedSocket(self, process, process, link, place)
        theirs = SimulatedSocket(self, listener.process, process, link, (here, 1))
        ours.other, theirs.other = theirs, ours
        listener.waiting.append(theirs)
        listener.wake()
        return ours

    # In the place of the module `select`

    def poll(self) -> SimulatedPoll:
        return SimulatedPoll(self)

    # In the place of the module `os`

    def sendfile(self, number: int, descriptor: int, offset: int, count: int) -> int:
        sock = self.sockets[number]
        data = os.pread(descriptor, min(count, PACKET, max(sock.room, 1)), offset)
        return sock.send_packet(memoryview(data)) if data else 0


class _Woken:
    """What threads of a process wait for."""

    def __init__(self, network: Network, process: SimulatedProcess) -> None:
        self.network, self.process = network, process
        self._latches = list[Any]()

    def wake(self) -> None:
        while self._latches:
            self._latches.pop().set()

    def sleep_until(self, until: float) -> None:
        """Until something happens here, or a time comes; or for a while, as the other process may have died."""
        latch = self.process.outside.latch()
        self._latches.append(latch)
        latch.wait(min(max(until - self.network.simulation.now, 0), _POLL))
        if latch in self._latches:
            self._latches.remove(latch)


class SimulatedListener(_Woken):
    """A socket that listens."""

    def __init__(self, network: Network, process: SimulatedProcess, place: tuple[str, int]) -> None:
        super().__init__(network, process)
        self.place = place
        self.waiting = deque[SimulatedSocket]()
        self.is_closed = False

    def getsockname(self) -> tuple[str, int]:
        return self.place

    def accept(self) -> tuple[SimulatedSocket, Any]:
        while not self.waiting:
            if self.is_closed:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            latch = self.process.outside.latch()
            self._latches.append(latch)
            latch.wait(1e9)
        return self.waiting.popleft(), None

    def shutdown(self, how: int) -> None:
        self.is_closed = True
        self.wake()

    def __enter__(self) -> SimulatedListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True


class SimulatedSocket(_Woken):
    """One end of a connection.

    Args:
        network: where it is
        process: whose it is
        client: the process that has connected
        link: the way to the other end
        place: where that is
    """

    other: SimulatedSocket

    def __init__(
        self,
        network: Network,
        process: SimulatedProcess,
        client: SimulatedProcess,
        link: Link,
        place: tuple[str, int],
    ) -> None:
        super().__init__(network, process)
        self._client, self.link, self._place = client, link, place
        self.number = _FIRST_NUMBER + len(network.sockets)
        network.sockets[self.number] = self
        self._made = network.simulation.now
        self._timeout: float | None = None
        self._patience = 1e9
        #: Packets that come, and when; how many bytes they are.
        self._coming = deque[tuple[float, bytes]]()
        self.unread = 0
        self._last_arrival = 0.0
        self._is_closed = self._reads_no_more = self.sends_no_more = False

    # How it is

    @property
    def _now(self) -> float:
        return self.network.simulation.now

    @property
    def has_ended(self) -> bool:
        """Whether the connection was given up by the system."""
        return self.link.has_ended(self._made, self._now)

    @property
    def _is_at_end(self) -> bool:
        """Whether nothing more comes."""
        other, up = self.other, not self.link.is_cut(self._now)
        return self._reads_no_more or (not self._coming and up and (other.sends_no_more or other.process.is_dead))

    @property
    def _has_data(self) -> bool:
        return bool(self._coming) and self._coming[0][0] <= self._now and not self.link.is_cut(self._now)

    @property
    def is_readable(self) -> bool:
        return self._has_data or self._is_at_end or self.has_ended

    @property
    def has_hung_up(self) -> bool:
        return self._is_closed or self.has_ended or (self._reads_no_more and self.sends_no_more) or self._is_at_end

    @property
    def room(self) -> int:
        """How many bytes may be sent now."""
        return 0 if self.link.is_cut(self._now) else max(WINDOW - self.other.unread, 0)

    def next_change(self, until: float) -> float:
        """When something may change by itself."""
        now = self._now
        times = [end for start, end in self.link.cuts if start <= now < end]
        times += [start + UNCONFIRMED for start, end in self.link.cuts if start <= now < end]
        times += [self._coming[0][0]] if self._coming else []
        return min([until, *(time for time in times if time > now)], default=until)

    # What the product calls

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if option == socket.SO_RCVTIMEO and level == socket.SOL_SOCKET:
            self._patience = float(struct.unpack("@ll", value)[0])

    def getpeername(self) -> tuple[str, int]:
        return self._place

    def fileno(self) -> int:
        return -1 if self._is_closed else self.number

    def sendall(self, data: bytes | memoryview) -> None:
        view, until = memoryview(data).cast("B"), self._now + (1e9 if self._timeout is None else self._timeout)
        while view.nbytes:
            while not self.room and self._may_send():
                if self._now >= until:
                    raise TimeoutError("timed out (simulated)")
                self.sleep_until(self.next_change(until))
            view = view[self.send_packet(view[: max(min(self.room, PACKET), 1)]) :]

    def send_packet(self, data: memoryview) -> int:
        """Send a few bytes."""
        self.network.operation(self.process, self._client)
        self.process.turn()
        self._may_send()
        link, packet = self.link, bytearray(data)
        if link.flips and len(packet) >= link.flips_from:
            link.flips -= 1
            self.network.flipped.append(self._now)
            packet[self.network.simulation.random.randrange(len(packet))] ^= 1 << 3
        other, now = self.other, self._now
        slow = len(packet) / link.slow_rate if now < link.slow_until else 0.0
        other._last_arrival = max(other._last_arrival, now) + _LATENCY + slow
        other._coming.append((other._last_arrival, bytes(packet)))
        other.unread += len(packet)
        other.wake()
        return len(packet)

    def _may_send(self) -> bool:
        if self.has_ended:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        if self._is_closed or self.sends_no_more:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        if not self.link.is_cut(self._now) and (self.other._is_closed or self.other.process.is_dead):
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        return True

    def recv(self, count: int) -> bytes:
        buffer = bytearray(count)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def recv_into(self, buffer: memoryview, count: int = 0, flags: int = 0) -> int:
        count, got = count or buffer.nbytes, 0
        blocks = self._timeout is None
        until = self._now + (self._patience if blocks else self._timeout or 0.0)
        while got < count:
            if self._has_data:
                self.process.turn()
                got += self._take(buffer[got:count])
                if not flags & socket.MSG_WAITALL:
                    break
                continue
            if self.has_ended:
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            if self._is_at_end:
                break
            if self._now >= until:
                if got:
                    break
                raise BlockingIOError(errno.EAGAIN, "timed out") if blocks else TimeoutError("timed out (simulated)")
            self.sleep_until(self.next_change(until))
        return got

    def _take(self, buffer: memoryview) -> int:
        if not self._coming:  # another thread was quicker
            return 0
        arrived, packet = self._coming.popleft()
        part = packet[: buffer.nbytes]
        buffer[: len(part)] = part
        if len(part) < len(packet):
            self._coming.appendleft((arrived, packet[len(part) :]))
        self.unread -= len(part)
        self.other.wake()
        return len(part)

    def shutdown(self, how: int) -> None:
        self.sends_no_more = True
        self._reads_no_more |= how == socket.SHUT_RDWR
        self.wake()
        self.other.wake()

    def close(self) -> None:
        self._is_closed = True
        self.shutdown(socket.SHUT_RDWR)


class SimulatedPoll:
    """Stands for a `select.poll` of one socket."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._wanted = 0

    def register(self, sock: SimulatedSocket | int, wanted: int) -> None:
        self._sock = self._network.sockets[sock] if isinstance(sock, int) else sock
        self._wanted = wanted

    def _found(self) -> bool:
        sock = self._sock
        if self._wanted & select.POLLIN and sock.is_readable:
            return True
        if self._wanted & select.POLLOUT and (sock.room or sock.has_ended or sock.other.has_hung_up):
            return True
        return self._wanted == 0 and sock.has_hung_up

    def poll(self, milliseconds: float) -> list[int]:
        sock, until = self._sock, self._network.simulation.now + milliseconds / 1000
        while not self._found():
            if self._network.simulation.now >= until:
                return []
            sock.sleep_until(sock.next_change(until))
        return [sock.number]
