"""`Hosts`: which ranks are on which host, and which hosts keep copies for which."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


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
