"""`Hosts`: which ranks are on which host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


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
        return len(set(self.names)) > 1

    def ranks_on(self, name: str) -> list[int]:
        """The ranks on a host, in order."""
        return [rank for rank, each in enumerate(self.names) if each == name]

    def leads(self, rank: int) -> bool:
        """Whether a rank is the first one on its host."""
        return self.names.index(self.names[rank]) == rank
