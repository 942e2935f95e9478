"""Connections of simulated processes: within a host, and between hosts, over links that are cut, slow, or flip a bit.

A host that is lost says nothing any more; a process that was killed hangs up. What listens at a path has a real, empty
file there, so that it may be renamed and deleted. Descriptors of real files are passed as copies.
"""

from __future__ import annotations

import errno
import math
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from ..core.outside import Address, Latch, Outside, Socket
from ..core.sockets import Sockets

#: Bytes that are on their way between hosts at most, and in one packet.
WINDOW, PACKET = 4096, 2048
#: The same, within a host.
_LOCAL = 1 << 20
#: A connection ends when nothing was confirmed for so long.
UNCONFIRMED = 30.0
_LATENCY, _POLL = 1e-4, 0.5
#: Numbers of sockets, in the place of descriptors.
_FIRST_NUMBER = 1 << 24
_BACKLOG = 128


class NetworkOwner(Protocol):
    """What is asked of the simulation: see `simulation.py`."""

    now: float
    random: Random
    network: SimulatedNetwork

    @property
    def processes(self) -> Sequence[SocketOwner]:
        """All that there were."""
        ...

    def park(self, until: float = math.inf) -> None:
        """Let the running thread wait."""
        ...


class SocketOwner(Protocol):
    """What is asked of a simulated process."""

    host: str
    pid: int
    is_dead: bool
    sockets: dict[SimulatedSocket, None]

    @property
    def simulation(self) -> NetworkOwner:
        """Where it is."""
        ...

    @property
    def outside(self) -> Outside:
        """What it runs in."""
        ...

    def turn(self) -> None:
        """Let others run."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


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
        """Whether nothing arrives now."""
        return any(start <= now < end for start, end in self.cuts)

    def heals(self, now: float) -> float:
        """When what is sent now may arrive."""
        return max([now, *(end for start, end in self.cuts if start <= now < end)])

    def has_ended(self, since: float, now: float) -> bool:
        """Whether a connection that was made then is given up."""
        return any(min(end, now) - max(start, since) >= UNCONFIRMED for start, end in self.cuts)


class SimulatedNetwork:
    """All hosts, and what listens on them.

    Attributes:
        operation: called before each operation on a socket: to connect, and to send a packet
        lost: hosts that are gone
        takes_over: places that listeners of other processes have now
        flipped: when a bit was flipped
        received: descriptors of real files that were passed on, each with its inode
    """

    def __init__(self, simulation: NetworkOwner) -> None:
        self.simulation = simulation
        self.operation: Callable[[SimulatedSocket], None] = lambda sock: None
        self.lost = set[str]()
        self.takes_over = dict[tuple[str, int], SocketOwner]()
        self.flipped = list[float]()
        self.received = list[tuple[int, int]]()
        self.listeners = dict[tuple[Any, ...], Listener]()
        self.sockets = dict[int, SimulatedSocket]()
        self._links = dict[frozenset[str], Link]()
        self._numbers, self._port = _FIRST_NUMBER, 20_000

    def forget(self) -> None:
        """Let go of all that was connected."""
        self.operation = lambda sock: None
        for each in (self.takes_over, self.listeners, self.sockets, self._links):
            each.clear()

    def link(self, one: str, other: str) -> Link:
        """The way between two hosts."""
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
        for process in self.simulation.processes:
            if process.host == host and not process.is_dead:
                process.kill()

    def address_of(self, host: str) -> str:
        """An address of a host, by which others reach it."""
        return f"10.9.{sum(host.encode()) % 250}.{len(host)}"

    def next_number(self) -> int:
        """A descriptor for a socket."""
        self._numbers += 1
        return self._numbers

    def next_port(self) -> int:
        """A port that is free."""
        self._port += 1
        return self._port


class _Woken:
    """What threads wait for."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self.network = network
        self._latches = list[Latch]()

    def wake(self) -> None:
        """Wake who waits."""
        while self._latches:
            self._latches.pop().set()

    def sleep_until(self, process: SocketOwner, until: float) -> None:
        """Let a thread of a process wait until something happens here, or until a time of the simulation."""
        latch = process.outside.latch()
        self._latches.append(latch)
        latch.wait(max(until - self.network.simulation.now, 0))
        if latch in self._latches:
            self._latches.remove(latch)


class Listener(_Woken):
    """What listens at a place."""

    def __init__(self, network: SimulatedNetwork, process: SocketOwner, place: Any) -> None:
        super().__init__(network)
        self.process, self.place = process, place
        self.waiting = deque[End]()
        self.is_shut = False

    @property
    def is_over(self) -> bool:
        """Whether nobody listens any more."""
        return self.is_shut or self.process.is_dead

    def wake_both(self) -> None:
        """Its process has ended: so have the connections that it has not taken."""
        self.wake()
        for end in self.waiting:
            end.wake_both()


class End(_Woken):
    """One end of a connection.

    Args:
        network: where it is
        client: the process that has connected
        link: the way to the other end
        is_local: whether both ends are on one host, connected by no address
        place: where the other end is
    """

    other: End

    def __init__(
        self, network: SimulatedNetwork, client: SocketOwner, link: Link, place: Any, *, is_local: bool
    ) -> None:
        super().__init__(network)
        self.client, self.link, self.place, self.is_local = client, link, place, is_local
        #: The ID of the process that was at the other end first.
        self.peer = client.pid
        self._made = network.simulation.now
        #: Who has it; what listens, as long as nobody has taken the connection; how often it is on its way to others.
        self.holders = set[SimulatedSocket]()
        self.listener: Listener | None = None
        self.on_its_way = 0
        #: Packets that come: when, and with which descriptors; how many bytes they are.
        self.coming = deque[tuple[float, bytes, list[int | End]]]()
        self.unread = 0
        self._last_arrival = 0.0
        self.reads_no_more = self.sends_no_more = False

    @property
    def now(self) -> float:
        """Simulated seconds."""
        return self.network.simulation.now

    @property
    def is_open(self) -> bool:
        """Whether anybody has it."""
        waits = self.listener is not None and not self.listener.is_over
        return waits or self.on_its_way > 0 or any(not holder.process.is_dead for holder in self.holders)

    @property
    def has_ended(self) -> bool:
        """Whether the connection was given up by the system."""
        return self.link.has_ended(self._made, self.now)

    @property
    def is_at_end(self) -> bool:
        """Whether nothing more comes."""
        other = self.other
        is_over = not self.coming and (other.sends_no_more or not other.is_open) and not self.link.is_cut(self.now)
        return self.reads_no_more or is_over

    @property
    def has_data(self) -> bool:
        """Whether something has come."""
        return bool(self.coming) and self.coming[0][0] <= self.now and not self.link.is_cut(self.now)

    @property
    def is_readable(self) -> bool:
        """Whether something has come, or the end."""
        return self.has_data or self.is_at_end or self.has_ended

    @property
    def has_hung_up(self) -> bool:
        """Whether the connection has ended, in both directions."""
        other = self.other
        if not self.is_local:
            return self.has_ended or self.is_at_end or (self.reads_no_more and self.sends_no_more)
        receives = not (self.reads_no_more or other.sends_no_more)
        sends = not (self.sends_no_more or other.reads_no_more)
        return not other.is_open or not (receives or sends)

    @property
    def room(self) -> int:
        """How many bytes may be sent now."""
        window = _LOCAL if self.is_local else WINDOW
        return 0 if self.link.is_cut(self.now) else max(window - self.other.unread, 0)

    @property
    def may_send(self) -> bool:
        """Whether a call of `poll` for room returns."""
        is_refused = not self.link.is_cut(self.now) and (not self.other.is_open or self.other.reads_no_more)
        return bool(self.room) or self.has_ended or self.sends_no_more or is_refused

    def next_change(self, until: float) -> float:
        """When something may change by itself."""
        now = self.now
        times = [end for start, end in self.link.cuts if start <= now < end]
        times += [start + UNCONFIRMED for start, end in self.link.cuts if start <= now < end]
        times += [self.coming[0][0]] if self.coming else []
        return min([until, *(time for time in times if time > now)], default=until)

    def wake_both(self) -> None:
        """Wake who waits at either end."""
        if not self.is_open:
            self.drop()
        self.wake()
        self.other.wake()

    def sleep_until(self, process: SocketOwner, until: float) -> None:
        """See the base class; between hosts only for a while, as a link may have been cut."""
        super().sleep_until(process, until if self.is_local else min(until, self.now + _POLL))

    def check(self) -> None:
        """Raise what sending raises if the connection has ended."""
        if self.has_ended:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        if self.sends_no_more:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        if not self.link.is_cut(self.now) and (not self.other.is_open or self.other.reads_no_more):
            if self.is_local:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

    def put(self, packet: bytearray, descriptors: list[int | End]) -> None:
        """Let a packet be on its way."""
        link, other, now = self.link, self.other, self.now
        if link.flips and len(packet) >= link.flips_from and not self.is_local:
            link.flips -= 1
            self.network.flipped.append(now)
            packet[self.network.simulation.random.randrange(len(packet))] ^= 1 << 3
        if not self.is_local:
            slow = len(packet) / link.slow_rate if now < link.slow_until else 0.0
            other._last_arrival = max(other._last_arrival, now) + _LATENCY + slow
        other.coming.append((other._last_arrival, bytes(packet), descriptors))
        other.unread += len(packet)
        other.wake()

    def take(self, count: int) -> tuple[bytes, list[int | End]]:
        """Some of what has come, at most so many bytes, of one packet."""
        if not self.coming:  # another thread was quicker
            return b"", []
        arrived, packet, descriptors = self.coming.popleft()
        part = packet[:count]
        if len(part) < len(packet):
            self.coming.appendleft((arrived, packet[len(part) :], []))
        self.unread -= len(part)
        self.other.wake()
        return part, descriptors

    def drop(self) -> None:
        """Nobody reads what has come any more."""
        while self.coming:
            _close(self.coming.popleft()[2])


class SimulatedSocket:
    """One end of a connection, or what listens, as a process has it.

    Args:
        process: whose it is
        end: which end, or what listens
    """

    def __init__(self, process: SocketOwner, end: End | Listener) -> None:
        self.process, self.end, self.network = process, end, end.network
        self._number = self.network.next_number()
        self.network.sockets[self._number] = self
        process.sockets[self] = None
        if isinstance(end, End):
            end.holders.add(self)
        self.timeout: float | None = None
        self.patience = math.inf

    @property
    def connected(self) -> End:
        """The end."""
        if not isinstance(self.end, End):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        if self._number < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self.end

    @property
    def client(self) -> SocketOwner:
        """The process that has connected."""
        return self.connected.client

    @property
    def is_local(self) -> bool:
        """Whether it is a connection within a host, by no address."""
        return isinstance(self.end, End) and self.end.is_local

    def copied_to(self, process: SocketOwner) -> SimulatedSocket:
        """The same end for another process, which inherits it, or is sent its descriptor."""
        return SimulatedSocket(process, self.connected)

    def settimeout(self, value: float | None, /) -> None:
        """Let each call take so many seconds."""
        self.timeout = value

    def gettimeout(self) -> float | None:
        """What was set."""
        return self.timeout

    def getsockname(self) -> Any:
        """Where it listens."""
        return self.end.place

    def getpeername(self) -> Any:
        """Where the other end is."""
        return self.connected.place

    def fileno(self) -> int:
        """Its descriptor; -1: it is closed."""
        return self._number

    def close(self) -> None:
        """Give it back."""
        if self._number >= 0:
            self.network.sockets.pop(self._number, None)  # `forget` may have come first
            self._number = -1
            del self.process.sockets[self]
            if isinstance(self.end, End):
                self.end.holders.discard(self)
            else:
                self.end.is_shut = True
            self.end.wake_both()

    def __enter__(self) -> SimulatedSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def shutdown(self, how: int, /) -> None:
        """Send no more, and with SHUT_RDWR receive no more; or stop to listen."""
        end = self.end
        if isinstance(end, Listener):
            end.is_shut = True
        else:
            end.sends_no_more = True
            end.reads_no_more |= how == socket.SHUT_RDWR
        end.wake_both()

    def accept(self) -> tuple[SimulatedSocket, Any]:
        """A connection; waits for one."""
        listener = self.end
        assert isinstance(listener, Listener)
        until = self._until()
        while not listener.waiting:
            if listener.is_shut:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            if self._now >= until:
                raise TimeoutError("timed out (simulated)")
            listener.sleep_until(self.process, until)
        end = listener.waiting.popleft()
        sock = SimulatedSocket(self.process, end)
        end.listener = None
        return sock, end.place

    def sendall(self, data: Any, /) -> None:
        """Send bytes."""
        view, until, end = memoryview(data).cast("B"), self._until(), self.connected
        most = _LOCAL if end.is_local else PACKET
        while view.nbytes:
            end.check()
            while not end.room:
                if self._now >= until:
                    raise TimeoutError("timed out (simulated)")
                end.sleep_until(self.process, end.next_change(until))
                end.check()
            view = view[self.send_packet(view[: max(min(end.room, most), 1)]) :]

    def send_packet(self, data: memoryview, descriptors: Sequence[int] = ()) -> int:
        """Send a few bytes."""
        end = self.connected
        self.network.operation(self)
        self.process.turn()
        end.check()
        end.put(bytearray(data), _copies(self.network, descriptors))
        return data.nbytes

    def recv(self, bufsize: int, /) -> bytes:
        """Some of what has come."""
        buffer = bytearray(bufsize)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def recv_into(self, buffer: Any, /) -> int:
        """Some of what has come."""
        view = memoryview(buffer).cast("B")
        if not view.nbytes or not self._wait(self._until()):
            return 0
        return self._take_into(view)

    def fill(self, view: memoryview) -> int:
        """As much as there is room for; less, if nothing comes for its patience."""
        self.timeout, got = None, 0
        while got < view.nbytes:
            try:
                if not self._wait(self._now + self.patience):
                    break
            except TimeoutError as error:
                if error.errno:
                    raise
                if got:
                    break
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
            got += self._take_into(view[got:])
        return got

    def receive_descriptors(self, count: int) -> tuple[bytes, list[int]]:
        """Some of what has come, with the descriptors."""
        if not self._wait(self._until()):
            return b"", []
        self.process.turn()
        data, descriptors = self.connected.take(count)
        return data, [_arrived(self.process, number) for number in descriptors]

    @property
    def _now(self) -> float:
        return self.network.simulation.now

    def _until(self) -> float:
        return self._now + (math.inf if self.timeout is None else self.timeout)

    def _wait(self, until: float) -> bool:
        """Wait until something has come; False: nothing more does."""
        end = self.connected
        while not end.has_data:
            if end.has_ended:
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            if end.is_at_end:
                return False
            if self._now >= until:
                raise TimeoutError("timed out (simulated)")
            end.sleep_until(self.process, end.next_change(until))
            end = self.connected
        return True

    def _take_into(self, view: memoryview) -> int:
        self.process.turn()
        data, descriptors = self.connected.take(view.nbytes)
        _close(descriptors)
        view[: len(data)] = data
        return len(data)


class SimulatedSockets(Sockets):
    """Those of a simulated process."""

    @property
    def _own(self) -> SocketOwner:
        """The process."""
        raise NotImplementedError

    def of(self, sock: Socket) -> SimulatedSocket:
        """A socket that belongs to this simulation."""
        assert isinstance(sock, SimulatedSocket), "a real socket"
        return sock

    def pair(self) -> tuple[SimulatedSocket, SimulatedSocket]:
        """Two ends of a new connection."""
        one, other = _connection(self._own, Link(), ("", ""), is_local=True)
        return SimulatedSocket(self._own, one), SimulatedSocket(self._own, other)

    def listen(self, address: Address) -> SimulatedSocket:
        """Let others connect; at a path there is a real file then."""
        network, process = self._own.simulation.network, self._own
        if isinstance(address, str):
            try:
                with open(address, "x") as stream:
                    status = os.fstat(stream.fileno())
            except FileExistsError as error:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from error
            listener = Listener(network, process, address)
            network.listeners[status.st_dev, status.st_ino] = listener
        else:
            listener = Listener(network, process, (address[0], address[1] or network.next_port()))
            network.listeners[listener.place] = listener
        return SimulatedSocket(process, listener)

    def connect(self, address: Address, seconds: float) -> SimulatedSocket:
        """Connect to one who listens."""
        process, simulation = self._own, self._own.simulation
        network, until = simulation.network, simulation.now + seconds
        is_local = isinstance(address, str)
        if isinstance(address, str):
            status = os.stat(address)
            listener = network.listeners.get((status.st_dev, status.st_ino))
            link, here = Link(), ""
        else:
            listener = network.listeners.get(address)
            if (owner := network.takes_over.get(address)) is not None:
                others = (each for each in network.listeners.values() if isinstance(each.place, tuple))
                listener = next((each for each in others if each.process is owner), None)
            here = process.host
            link = network.link(here, "" if listener is None else listener.process.host)
        ours, theirs = _connection(process, link, (address, (here, 1)), is_local=is_local)
        sock = SimulatedSocket(process, ours)
        try:
            sock.settimeout(seconds)
            network.operation(sock)
            process.turn()
            while link.is_cut(simulation.now):
                if simulation.now >= until:
                    raise TimeoutError("timed out (simulated)")
                simulation.park(min(until, link.heals(simulation.now)))
            if listener is None or listener.is_over:
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            while len(listener.waiting) >= _BACKLOG:
                if simulation.now >= until:
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                self.sleep(_LATENCY * 100)
        except BaseException:
            sock.close()
            raise
        ours.peer, theirs.listener = listener.process.pid, listener
        listener.waiting.append(theirs)
        listener.wake()
        return sock

    def adopt(self, descriptor: int) -> SimulatedSocket:
        """The socket of a descriptor that was received."""
        sock = self._own.simulation.network.sockets[descriptor]
        assert sock.process is self._own
        return sock

    def address_towards(self, host: str) -> str:
        """The address of this host."""
        return self._own.simulation.network.address_of(self._own.host)

    def credentials(self, sock: Socket) -> tuple[int, int]:
        """This user, and the process at the other end that has connected or listens."""
        return os.getuid(), self.of(sock).connected.peer

    def watch_host(self, sock: Socket, patience: float) -> None:
        """Remember the patience."""
        self.of(sock).patience = patience

    def ready(self, sock: Socket, seconds: float, *, to_send: bool = False) -> bool:
        """Wait until there is something."""
        ours, simulation = self.of(sock), self._own.simulation
        end, until = ours.end, simulation.now + max(seconds, 0)
        while ours.fileno() >= 0:
            if isinstance(end, Listener):
                if end.waiting or end.is_shut:
                    return True
                change = until
            elif end.may_send if to_send else end.is_readable:
                return True
            else:
                change = end.next_change(until)
            if simulation.now >= until:
                return False
            end.sleep_until(self._own, change)
        return True

    def has_hung_up(self, sock: Socket) -> bool:
        """Whether a connection has ended."""
        ours = self.of(sock)
        return ours.fileno() < 0 or ours.connected.has_hung_up

    def send_descriptors(self, sock: Socket, data: bytes, descriptors: Sequence[int]) -> None:
        """Send bytes and copies of descriptors."""
        self.of(sock).send_packet(memoryview(data), descriptors)

    def receive_descriptors(self, sock: Socket, count: int) -> tuple[bytes, list[int]]:
        """What came, and descriptors."""
        return self.of(sock).receive_descriptors(count)

    def send_file(self, sock: Socket, descriptor: int, offset: int, count: int) -> int:
        """Send a packet of what a real file has."""
        ours = self.of(sock)
        end = ours.connected
        end.check()
        if not end.room:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        data = os.pread(descriptor, min(count, _LOCAL if end.is_local else PACKET, end.room), offset)
        return ours.send_packet(memoryview(data)) if data else 0

    def fill(self, sock: Socket, buffer: memoryview) -> int:
        """Receive as much as a buffer has room for."""
        return self.of(sock).fill(buffer)


def _connection(client: SocketOwner, link: Link, places: tuple[Any, Any], *, is_local: bool) -> tuple[End, End]:
    network = client.simulation.network
    one, other = (End(network, client, link, place, is_local=is_local) for place in places)
    one.other, other.other = other, one
    return one, other


def _copies(network: SimulatedNetwork, descriptors: Sequence[int]) -> list[int | End]:
    """Copies of descriptors, for who receives them; an end of a connection stays open meanwhile."""
    copies = list[int | End]()
    for number in descriptors:
        if number in network.sockets:
            end = network.sockets[number].connected
            end.on_its_way += 1
            copies.append(end)
        else:
            copies.append(os.dup(number))
    return copies


def _arrived(process: SocketOwner, copy: int | End) -> int:
    """A descriptor that a process has received."""
    if isinstance(copy, End):
        sock = SimulatedSocket(process, copy)
        copy.on_its_way -= 1
        return sock.fileno()
    process.simulation.network.received.append((copy, os.fstat(copy).st_ino))
    return copy


def _close(copies: Sequence[int | End]) -> None:
    """Nobody receives these."""
    for copy in copies:
        if isinstance(copy, End):
            copy.on_its_way -= 1
            copy.wake_both()
        else:
            os.close(copy)
