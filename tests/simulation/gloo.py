"""Stands for `torch.distributed` where ranks pass bytes on: messages between simulated processes, over their links.

A message is taken when both sides are there. Who dies hangs up on all; so does who waits too long for one message, as
gloo does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from ckpt_component.core.state.dense_tensors import tensor_bytes
from ckpt_component.testing.simulated_network import Link
from ckpt_component.testing.simulation import SimulatedProcess, Simulation

_POLL = 0.1


@dataclass
class Group:
    """A process group.

    Attributes:
        members: its processes, by rank
        came: those that have made it
        closed: those that have hung up
        messages: that are on their way: what is sent, and whether it was taken
        values: of the collectives, by their number and rank
    """

    members: list[SimulatedProcess]
    came: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)
    messages: dict[tuple[int, int, int], list[Message]] = field(default_factory=lambda: defaultdict(list))
    values: dict[int, dict[int, Any]] = field(default_factory=lambda: defaultdict(dict))
    calls: dict[int, int] = field(default_factory=lambda: defaultdict(int))


@dataclass
class Message:
    """Bytes on their way; `sent` is when."""

    data: bytes
    sent: float
    is_taken: bool = False


class SimulatedGloo:
    """See the top of this file.

    Args:
        simulation: where it is, with the links
        members_of: the processes of the job of a process, by rank
        operation: called before each message
    """

    def __init__(
        self,
        simulation: Simulation,
        members_of: Callable[[SimulatedProcess], list[SimulatedProcess]],
        operation: Callable[[SimulatedProcess, SimulatedProcess], None],
    ) -> None:
        self.simulation, self._members_of, self._operation = simulation, members_of, operation
        self._network = simulation.network
        self._groups = dict[tuple[int, int], Group]()
        self._made = defaultdict[SimulatedProcess, int](int)

    @property
    def group(self) -> SimpleNamespace:
        return SimpleNamespace(WORLD=self)

    @property
    def _now(self) -> float:
        return self.simulation.now

    def _own(self) -> tuple[list[SimulatedProcess], int]:
        process = self.simulation.current.process
        members = self._members_of(process)
        return members, members.index(process)

    def link(self, members: list[SimulatedProcess], one: int, other: int) -> Link:
        return self._network.link(members[one].host, members[other].host)

    def turn(self) -> None:
        process = self.simulation.current.process
        self._operation(process, process)
        process.turn()

    def wait(self, group: Group, with_ranks: list[int], is_done: Callable[[], bool], seconds: float) -> None:
        """Wait for something from other ranks."""
        _, own = self._own()
        until = self._now + seconds
        while not is_done():
            for rank in (own, *with_ranks):
                process = group.members[rank]
                is_silent = process.host in self._network.lost
                if rank in group.closed or (process.is_dead and not is_silent):
                    raise RuntimeError(f"Connection closed by peer (simulated): rank {rank}")
            if self._now >= until:
                group.closed.add(own)
                raise RuntimeError("Timed out waiting for an operation (simulated)")
            self.simulation.park(min(self._now + _POLL, until))

    # What the product calls

    def get_world_size(self) -> int:
        return len(self._own()[0])

    def new_group(self, backend: str, timeout: timedelta) -> Group:
        self.turn()
        members, own = self._own()
        self._made[members[own]] += 1
        key = id(members), self._made[members[own]]
        group = self._groups.setdefault(key, Group(members))
        group.came.add(own)
        others = [rank for rank in range(len(members)) if rank != own]
        self.wait(group, others, lambda: len(group.came) == len(members), timeout.total_seconds())
        return group

    def destroy_process_group(self, group: Group) -> None:
        group.closed.add(self._own()[1])

    def all_gather_object(self, found: list[Any], value: Any, group: Group) -> None:
        self.turn()
        _, own = self._own()
        number = group.calls[own] = group.calls[own] + 1
        values = group.values[number]
        values[own] = value
        others = [rank for rank in range(len(group.members)) if rank != own]

        def is_done() -> bool:
            links = [self.link(group.members, own, rank) for rank in others]
            return len(values) == len(group.members) and not any(link.is_cut(self._now) for link in links)

        self.wait(group, others, is_done, 20.0)
        found[:] = [values[rank] for rank in range(len(group.members))]

    def isend(self, tensor: torch.Tensor, dst: int, group: Group, tag: int) -> Sending:
        self.turn()
        _, own = self._own()
        if own in group.closed or dst in group.closed:
            raise RuntimeError("Connection closed by peer (simulated)")
        data, link = bytearray(tensor_bytes(tensor)), self.link(group.members, own, dst)
        if link.flips:
            link.flips -= 1
            self._network.flipped.append(self._now)
            data[self.simulation.random.randrange(len(data))] ^= 1 << 5
        slow = len(data) / link.slow_rate if self._now < link.slow_until else 0.0
        message = Message(bytes(data), self._now + slow)
        group.messages[own, dst, tag].append(message)
        return Sending(self, group, dst, message)

    def irecv(self, tensor: torch.Tensor, src: int, group: Group, tag: int) -> Receiving:
        self.turn()
        return Receiving(self, group, src, tag, tensor)


@dataclass
class Sending:
    """What `isend` returns."""

    gloo: SimulatedGloo
    group: Group
    to: int
    message: Message

    def wait(self, timeout: timedelta) -> None:
        self.gloo.wait(self.group, [self.to], lambda: self.message.is_taken, timeout.total_seconds())


@dataclass
class Receiving:
    """What `irecv` returns."""

    gloo: SimulatedGloo
    group: Group
    source: int
    tag: int
    tensor: torch.Tensor

    def wait(self, timeout: timedelta) -> None:
        gloo, group = self.gloo, self.group
        simulation = gloo.simulation
        own = group.members.index(simulation.current.process)
        link, key = gloo.link(group.members, own, self.source), (self.source, own, self.tag)

        def is_done() -> bool:
            coming, now = group.messages[key], simulation.now
            return bool(coming) and coming[0].sent <= now and not link.is_cut(now)

        gloo.wait(group, [self.source], is_done, timeout.total_seconds())
        message = group.messages[key].pop(0)
        message.is_taken = True
        view = tensor_bytes(self.tensor)
        view[:] = message.data[: view.nbytes]
