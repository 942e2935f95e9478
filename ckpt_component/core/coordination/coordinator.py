"""One decision on all ranks: the leader decides from every rank's value, and every rank gets the decision.

A save or a load asks its questions in five ways:

- `decide`: every rank sends a value, rank 0 decides.
- `meet`: the same, at the beginning of a call that all ranks must make.
- `scatter`: the same, with a part of the decision for each rank.
- `run_on_leader`: rank 0 alone does something, all ranks get the result.
- `all_succeed`: every rank does its part, and gets an error if any part failed.

With one rank, all of them are plain calls.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...errors import CheckpointWorldError
from ..outside import OUTSIDE, Outside


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job.

    Attributes:
        names: the host of each rank
    """

    names: tuple[str, ...]

    @classmethod
    def of_runs(cls, runs: Sequence[tuple[str, int]]) -> Hosts:
        """The inverse of `runs`."""
        return cls(tuple(name for name, count in runs for _ in range(count)))

    def runs(self) -> list[tuple[str, int]]:
        """The hosts in the order of ranks, each with how many ranks in a row are on it: short, as JSON values."""
        return [(name, len([*ranks])) for name, ranks in itertools.groupby(self.names)]

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return len(self._ranks) > 1

    @cached_property
    def _ranks(self) -> dict[str, list[int]]:
        """The ranks on each host, in order. Found once, as a job may have thousands of hosts."""
        ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(self.names):
            ranks.setdefault(name, []).append(rank)
        return ranks

    @cached_property
    def _order(self) -> list[str]:
        """The hosts in the order of their first ranks."""
        return [*self._ranks]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The place of each host in that order."""
        return {name: number for number, name in enumerate(self._order)}

    def ranks_on(self, name: str) -> list[int]:
        """The ranks on a host, in order."""
        return [*self._ranks.get(name, ())]

    def leads(self, rank: int) -> bool:
        """Whether a rank is the first one on its host."""
        return self._ranks[self.names[rank]][0] == rank

    def elsewhere(self, rank: int) -> frozenset[int]:
        """The ranks on other hosts than a rank's."""
        return frozenset(other for other, name in enumerate(self.names) if name != self.names[rank])

    def peers_of(self, name: str, given: Mapping[str, str], replicas: int) -> list[str]:
        """The hosts that have copies for a host: half the hosts away, as neighbours are often lost together.

        Args:
            name: the host
            given: for some hosts, the one that comes first instead; one that is not of this job is passed over
            replicas: how many there are; fewer, if there are not so many other hosts
        """
        order, first = self._order, self._numbers[name] + len(self._order) // 2
        wanted = [given[name]] if given.get(name) in self._ranks else []
        # Of these, one may be the host itself, and one wanted already.
        others = [order[(first + more) % len(order)] for more in range(min(replicas + 2, len(order)))]
        return [host for host in dict.fromkeys([*wanted, *others]) if host != name][:replicas]

    def peer_ranks(self, rank: int, given: Mapping[str, str], replicas: int) -> list[int]:
        """The ranks that have copies for a rank: on each of those hosts the one with the same place. See `peers_of`."""
        name = self.names[rank]
        place, peers = self.ranks_on(name).index(rank), list[int]()
        for peer in self.peers_of(name, given, replicas):
            there = self.ranks_on(peer)
            peers.append(there[place % len(there)])
        return peers


def distributed() -> Any:
    """`torch.distributed` if the script has initialized it, else None."""
    dist = sys.modules.get("torch.distributed")  # a script that uses it has imported it
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist


class Coordinator(ABC):
    """Lets all ranks of a checkpointer agree.

    Every rank must call the same methods with the same tags in the same order. Values are plain JSON; tags are unique.

    Args:
        rank: this rank
        world_size: number of ranks
        outside: by which this rank waits for others

    Attributes:
        outside: the same; deadlines are times of it
        meetings: number of questions that `meet` has asked, by name; equal on all ranks that have called
    """

    def __init__(self, rank: int, world_size: int, outside: Outside = OUTSIDE) -> None:
        self.outside = outside
        self.rank = rank
        self.world_size = world_size
        self.meetings: Counter[str] = Counter()
        dist = distributed()
        # Weak, so as not to keep a destroyed process group alive.
        self._group = None if dist is None else weakref.ref(dist.group.WORLD)

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides, inspects the file system, and commits."""
        return self.rank == 0

    def check_world(self) -> None:
        """Check that the default process group is the one that this was built with. Sends no message.

        No process group is fine too: after `destroy_process_group()` the ranks keep their connections to the store.

        Raises:
            CheckpointWorldError: a process group was initialized after this was built
        """
        dist = distributed()
        if dist is None or dist.get_world_size() == self.world_size == 1:
            return
        if self._group is None:
            raise CheckpointWorldError(
                f"torch.distributed was initialized, with {dist.get_world_size()} ranks, after this manager or "
                "checkpointer was built, so each rank would save and load for itself; build it after "
                "init_process_group()."
            )
        if self._group() is not dist.group.WORLD:
            raise CheckpointWorldError(
                "The process group was destroyed and initialized again after this manager or checkpointer was built; "
                "build a new one after init_process_group()."
            )

    def at_step(self, step: int) -> None:
        """Record this rank's training step, for ranks that wait for it. Sends no message."""

    def resumed(self, step: int) -> None:
        """Record that all ranks continue from an earlier step."""

    @abstractmethod
    def decide(self, tag: str, value: Any, decide: Callable[[list[Any]], Any], deadline: float) -> Any:
        """Send a value to the leader and return the leader's decision.

        Args:
            tag: names the question
            value: this rank's value
            decide: called on the leader with all values, by rank
            deadline: monotonic seconds

        Returns:
            What `decide` returned, on all ranks.

        Raises:
            CheckpointError: what `decide` raised, on all ranks
            CheckpointTimeoutError: a rank did not send its value in time, or the leader did not decide
            RanksError: a rank is dead
        """

    @abstractmethod
    def meet(
        self, name: str, value: Any, decide: Callable[[list[Any]], Any], deadline: float, about: str | None = None
    ) -> Any:
        """Like `decide`, at the start of a call that all ranks must make; a rank that calls alone gets an error early.

        The questions of a name are numbered. A question that a rank withdrew, because it was alone, keeps its number.

        Args:
            name: the method that was called
            value: this rank's value
            decide: called on the leader with all values, by rank
            deadline: monotonic seconds
            about: distinguishes the call from others of the method; None: by where the rank is in its run

        Raises:
            RanksError: a rank has continued without making the call. For other errors see `decide`.
        """

    @abstractmethod
    def scatter(self, tag: str, value: Any, decide: Callable[[list[Any]], list[Any]], deadline: float) -> Any:
        """Like `decide`, but each rank gets only its own part of the decision.

        Sending all parts to all ranks would be quadratic in their number.

        Args:
            tag: names the question
            value: this rank's value
            decide: called on the leader with all values, by rank; returns the parts, by rank
            deadline: monotonic seconds
        """

    @abstractmethod
    def run_on_leader(self, tag: str, action: Callable[[], Any], deadline: float, name: str | None = None) -> Any:
        """Run an action on the leader; all ranks get what it returned or raised.

        Args:
            tag: names the question
            action: called on the leader alone
            deadline: monotonic seconds
            name: the method whose call begins with this question; see `meet`
        """

    @abstractmethod
    def all_succeed(self, tag: str, work: Callable[[], Any], progress: Callable[[], int], deadline: float) -> list[Any]:
        """Do this rank's part, then wait until every rank's part has succeeded.

        Args:
            tag: names the question
            work: this rank's part
            progress: returns the bytes written so far, to tell a slow rank from a hung one
            deadline: monotonic seconds

        Returns:
            On the leader, what `work` returned, by rank. On the others an empty list: sending the results to all ranks
            would be quadratic in their number.

        Raises:
            RanksError: a rank's part failed, or a rank is dead; the same error on all ranks, which names those ranks
        """

    def close(self) -> None:
        """Close the connections. Safe to call twice."""


class LocalCoordinator(Coordinator):
    """The coordinator of a single rank, which is its own leader.

    Args:
        outside: what it runs in
    """

    def __init__(self, outside: Outside = OUTSIDE) -> None:
        super().__init__(0, 1, outside)

    def decide(self, tag: str, value: Any, decide: Callable[[list[Any]], Any], deadline: float) -> Any:
        """Decide from the one value."""
        return decide([value])

    def meet(
        self, name: str, value: Any, decide: Callable[[list[Any]], Any], deadline: float, about: str | None = None
    ) -> Any:
        """Decide from the one value."""
        self.meetings[name] += 1
        return decide([value])

    def scatter(self, tag: str, value: Any, decide: Callable[[list[Any]], list[Any]], deadline: float) -> Any:
        """Decide from the one value; there is one part."""
        return decide([value])[0]

    def run_on_leader(self, tag: str, action: Callable[[], Any], deadline: float, name: str | None = None) -> Any:
        """Run the action."""
        return action()

    def all_succeed(self, tag: str, work: Callable[[], Any], progress: Callable[[], int], deadline: float) -> list[Any]:
        """Do the work."""
        return [work()]
