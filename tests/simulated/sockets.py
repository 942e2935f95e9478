"""Sockets of simulated processes: what listens, and the ends of connections.

What listens at a path has a real, empty file there, so that it may be renamed and deleted. Descriptors of real files
are passed as copies.
"""

from __future__ import annotations

import errno
import math
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckpt_component.core.outside import Address, Socket
from ckpt_component.core.sockets import Sockets

from .connections import LATENCY, LOCAL, PACKET, End, Link, Listener, SimulatedNetwork, close_all

if TYPE_CHECKING:
    from .hosts import HostProcess

_BACKLOG = 128


class SimulatedSocket:
    """One end of a connection, or what listens, as a process has it.

    Args:
        process: whose it is
        end: which end, or what listens
    """

    def __init__(self, process: HostProcess, end: End | Listener) -> None:
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
    def client(self) -> HostProcess:
        """The process that has connected."""
        return self.connected.client

    @property
    def is_local(self) -> bool:
        """Whether it is a connection within a host, by no address."""
        return isinstance(self.end, End) and self.end.is_local

    def copied_to(self, process: HostProcess) -> SimulatedSocket:
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
        most = LOCAL if end.is_local else PACKET
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
        close_all(descriptors)
        view[: len(data)] = data
        return len(data)


class SimulatedSockets(Sockets):
    """Those of a simulated process."""

    process: HostProcess

    def of(self, sock: Socket) -> SimulatedSocket:
        """A socket that belongs to this simulation."""
        assert isinstance(sock, SimulatedSocket), "a real socket"
        return sock

    def pair(self) -> tuple[SimulatedSocket, SimulatedSocket]:
        """Two ends of a new connection."""
        one, other = _connection(self.process, Link(), ("", ""), is_local=True)
        return SimulatedSocket(self.process, one), SimulatedSocket(self.process, other)

    def listen(self, address: Address) -> SimulatedSocket:
        """Let others connect; at a path there is a real file then."""
        network, process = self.process.simulation.network, self.process
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
        process, simulation = self.process, self.process.simulation
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
                self.sleep(LATENCY * 100)
        except BaseException:
            sock.close()
            raise
        ours.peer, theirs.listener = listener.process.pid, listener
        listener.waiting.append(theirs)
        listener.wake()
        return sock

    def adopt(self, descriptor: int) -> SimulatedSocket:
        """The socket of a descriptor that was received."""
        sock = self.process.simulation.network.sockets[descriptor]
        assert sock.process is self.process
        return sock

    def address_towards(self, host: str) -> str:
        """The address of this host."""
        return self.process.simulation.network.address_of(self.process.host)

    def credentials(self, sock: Socket) -> tuple[int, int]:
        """This user, and the process at the other end that has connected or listens."""
        return os.getuid(), self.of(sock).connected.peer

    def watch_host(self, sock: Socket, patience: float) -> None:
        """Remember the patience."""
        self.of(sock).patience = patience

    def ready(self, sock: Socket, seconds: float, *, to_send: bool = False) -> bool:
        """Wait until there is something."""
        ours, simulation = self.of(sock), self.process.simulation
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
            end.sleep_until(self.process, change)
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
        data = os.pread(descriptor, min(count, LOCAL if end.is_local else PACKET, end.room), offset)
        return ours.send_packet(memoryview(data)) if data else 0

    def fill(self, sock: Socket, buffer: memoryview) -> int:
        """Receive as much as a buffer has room for."""
        return self.of(sock).fill(buffer)


def _connection(client: HostProcess, link: Link, places: tuple[Any, Any], *, is_local: bool) -> tuple[End, End]:
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


def _arrived(process: HostProcess, copy: int | End) -> int:
    """A descriptor that a process has received."""
    if isinstance(copy, End):
        sock = SimulatedSocket(process, copy)
        copy.on_its_way -= 1
        return sock.fileno()
    process.simulation.network.received.append((copy, os.fstat(copy).st_ino))
    return copy
