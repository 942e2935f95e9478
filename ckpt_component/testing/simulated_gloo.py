"""`SimulatedGloo`: what the ranks of a simulated job have in the place of `torch.distributed`, to pass bytes on.

A message is received when both ranks wait for it, over the link of their hosts. A rank that ends closes its
connections, unless its host is gone; so does one that times out, as gloo does. A group waits for all ranks, also for
dead ones.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from ..core.outside import Latch
from ..core.state.dense_tensors import tensor_bytes
from .simulation import SimulatedProcess

#: How often a wait looks whether a link is up again, or a process has ended.
_POLL = 0.1


@dataclass
class Message:
    """Bytes on their way: when they arrive, if their link is not cut then, and whether they were taken."""

    data: bytes
    arrives: float
    is_taken: bool = False


class SimulatedGroup:
    """A process group; `came` and `left`: the ranks that have made it, and that have hung up."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.came, self.left = set[int](), set[int]()
        #: By sender, receiver and tag. When the last one of a sender to a receiver arrives. Collectives of each rank.
        self.messages = defaultdict[tuple[int, int, Any], deque[Message]](deque)
        self.last = defaultdict[tuple[int, int], float](float)
        self.gathered = Counter[int]()
        self._waiting = list[Latch]()

    def wake(self) -> None:
        """Wake who waits."""
        while self._waiting:
            self._waiting.pop().set()

    def sleep(self, process: SimulatedProcess, seconds: float) -> None:
        """Let a thread of a process wait until something happens here, at most so many seconds."""
        latch = process.outside.latch()
        self._waiting.append(latch)
        latch.wait(min(seconds, _POLL))


class SimulatedGloo:
    """See the top of this file: names and arguments of the methods are those of `torch.distributed`.

    Args:
        members: the processes of the job, by rank
        operation: called before each operation, with the process that does it
    """

    def __init__(self, members: Sequence[SimulatedProcess], operation: Callable[[SimulatedProcess], None]) -> None:
        self.group = SimpleNamespace(WORLD=self)
        self._members, self._operation = members, operation
        self._simulation = members[0].simulation
        self._groups, self._made = list[SimulatedGroup](), Counter[int]()

    def get_world_size(self) -> int:
        """Number of ranks."""
        return len(self._members)

    def new_group(self, backend: str, timeout: timedelta) -> SimulatedGroup:
        """The next group of all ranks."""
        own = self._begin()
        if self._made[own] == len(self._groups):
            self._groups.append(SimulatedGroup(timeout))
        group = self._groups[self._made[own]]
        self._made[own] += 1
        group.came.add(own)
        group.wake()
        self.wait(group, (), timeout, lambda: len(group.came) == len(self._members))
        return group

    def destroy_process_group(self, group: SimulatedGroup) -> None:
        """Hang up."""
        group.left.add(self._own)
        group.wake()

    def all_gather_object(self, found: list[Any], value: Any, group: SimulatedGroup) -> None:
        """Send a value to all, and take theirs."""
        own, data = self._begin(), pickle.dumps(value)
        group.gathered[own] += 1
        tag = "gather", group.gathered[own]
        for rank in range(len(found)):
            if rank != own:
                self._send(group, rank, tag, data)
        for rank in range(len(found)):
            found[rank] = value if rank == own else pickle.loads(self._take(group, rank, tag, group.timeout))

    def isend(self, tensor: torch.Tensor, dst: int, group: SimulatedGroup, tag: int) -> SimulatedWork:
        """Begin to send."""
        own, data = self._begin(), bytearray(tensor_bytes(tensor))
        link, network = self._link(own, dst), self._simulation.network
        if link.flips and len(data) >= link.flips_from and self._members[own].host != self._members[dst].host:
            link.flips -= 1
            network.flipped.append(self._simulation.now)
            data[self._simulation.random.randrange(len(data))] ^= 1 << 5
        message = self._send(group, dst, tag, bytes(data))
        return SimulatedWork(lambda timeout: self.wait(group, (dst,), timeout, lambda: message.is_taken))

    def irecv(self, tensor: torch.Tensor, src: int, group: SimulatedGroup, tag: int) -> SimulatedWork:
        """Begin to receive."""
        self._begin()

        def take(timeout: timedelta) -> None:
            data = self._take(group, src, tag, timeout)
            assert len(data) == tensor.nbytes, "gloo would end the process"
            tensor_bytes(tensor)[:] = data

        return SimulatedWork(take)

    def wait(
        self, group: SimulatedGroup, ranks: Collection[int], timeout: timedelta, is_done: Callable[[], bool]
    ) -> None:
        """Wait for something from other ranks. Raises RuntimeError: it will not come, or not in time."""
        own, until = self._own, self._simulation.now + timeout.total_seconds()
        while not is_done():
            if any(self._has_left(group, rank) for rank in (own, *ranks)):
                raise RuntimeError("Connection closed by peer (simulated)")
            if self._simulation.now >= until:
                self.destroy_process_group(group)
                raise RuntimeError("Timed out waiting for an operation (simulated)")
            group.sleep(self._members[own], until - self._simulation.now)

    @property
    def _own(self) -> int:
        """The rank that calls."""
        return self._members.index(self._simulation.current.process)

    def _begin(self) -> int:
        """Begin an operation of the rank that calls, which is returned."""
        process = self._simulation.current.process
        self._operation(process)
        process.turn()
        return self._own

    def _link(self, one: int, other: int) -> Any:
        return self._simulation.network.link(self._members[one].host, self._members[other].host)

    def _has_left(self, group: SimulatedGroup, rank: int) -> bool:
        process = self._members[rank]
        return rank in group.left or (process.is_dead and process.host not in self._simulation.network.lost)

    def _send(self, group: SimulatedGroup, to: int, tag: Any, data: bytes) -> Message:
        own, now = self._own, self._simulation.now
        if any(self._has_left(group, rank) for rank in (own, to)):
            raise RuntimeError("Connection closed by peer (simulated)")
        link, begins = self._link(own, to), max(now, group.last[own, to])
        group.last[own, to] = min(begins + len(data) / link.slow_rate, max(begins, link.slow_until))
        message = Message(data, group.last[own, to])
        group.messages[own, to, tag].append(message)
        group.wake()
        return message

    def _take(self, group: SimulatedGroup, sender: int, tag: Any, timeout: timedelta) -> bytes:
        link, coming = self._link(self._own, sender), group.messages[sender, self._own, tag]

        def has_come() -> bool:
            now = self._simulation.now
            return bool(coming) and coming[0].arrives <= now and not link.is_cut(now)

        self.wait(group, (sender,), timeout, has_come)
        message = coming.popleft()
        message.is_taken = True
        group.wake()
        return message.data


@dataclass
class SimulatedWork:
    """What `isend` and `irecv` return."""

    wait: Callable[[timedelta], None]
