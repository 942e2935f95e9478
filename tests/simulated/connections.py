"""Connections of simulated processes: within a host, and between hosts, over links that are cut, slow, or flip a bit.

A host that is lost says nothing any more; a process that was killed hangs up.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt_component.core.outside import Latch

if TYPE_CHECKING:
    from .hosts import HostProcess, SimulatedHosts
    from .sockets import SimulatedSocket

#: Bytes that are on their way between hosts at most, and in one packet.
WINDOW, PACKET = 4096, 2048
#: The same, within a host.
LOCAL = 1 << 20
#: A connection ends when nothing was confirmed for so long.
UNCONFIRMED = 30.0
LATENCY, _POLL = 1e-4, 0.5
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

    def __init__(self, simulation: SimulatedHosts) -> None:
        self.simulation = simulation
        self.operation: Callable[[SimulatedSocket], None] = lambda sock: None
        self.lost = set[str]()
        self.takes_over: dict[tuple[str, int], HostProcess] = {}
        self.flipped = list[float]()
        self.received = list[tuple[int, int]]()
        self.listeners = dict[tuple[Any, ...], Listener]()
        self.sockets: dict[int, SimulatedSocket] = {}
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

    def sleep_until(self, process: HostProcess, until: float) -> None:
        """Let a thread of a process wait until something happens here, or until a time of the simulation."""
        latch = process.outside.latch()
        self._latches.append(latch)
        latch.wait(max(until - self.network.simulation.now, 0))
        if latch in self._latches:
            self._latches.remove(latch)


class Listener(_Woken):
    """What listens at a place."""

    def __init__(self, network: SimulatedNetwork, process: HostProcess, place: Any) -> None:
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
        self, network: SimulatedNetwork, client: HostProcess, link: Link, place: Any, *, is_local: bool
    ) -> None:
        super().__init__(network)
        self.client, self.link, self.place, self.is_local = client, link, place, is_local
        #: The ID of the process that was at the other end first.
        self.peer = client.pid
        self._made = network.simulation.now
        #: Who has it; what listens, as long as nobody has taken the connection; how often it is on its way to others.
        self.holders: set[SimulatedSocket] = set()
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
        window = LOCAL if self.is_local else WINDOW
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

    def sleep_until(self, process: HostProcess, until: float) -> None:
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
            other._last_arrival = max(other._last_arrival, now) + LATENCY + slow
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
            close_all(self.coming.popleft()[2])


def close_all(copies: Sequence[int | End]) -> None:
    """Nobody receives these."""
    for copy in copies:
        if isinstance(copy, End):
            copy.on_its_way -= 1
            copy.wake_both()
        else:
            os.close(copy)
