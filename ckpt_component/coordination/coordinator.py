"""One decision per save on all ranks: commit or give up.

The saver asks its coordinator for an attempt, votes with what this rank wrote or why it failed, and learns the
decision. With one rank there is nobody to ask; the store-based coordinator for many ranks has the same face.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ..storage.names import new_token


class Coordinator(ABC):
    """What the saver needs from the ranks together. `rank` is this one's, `world_size` how many there are."""

    rank: int
    world_size: int

    @property
    def leads(self) -> bool:
        """Whether this rank makes the staging folder and commits."""
        return self.rank == 0

    @abstractmethod
    def agree_on_attempt(self, target: str, deadline: float) -> str:
        """A token for one attempt to make `target`, the same on all ranks.

        Args:
            target: absolute path of the checkpoint.
            deadline: monotonic seconds.
        """

    @abstractmethod
    def collect_votes(
        self, token: str, vote: Mapping[str, Any] | Exception, deadline: float
    ) -> Sequence[Mapping[str, Any]]:
        """Vote with what this rank wrote, or with its error; returns what every rank wrote, by rank.

        Raises:
            CheckpointSaveError: a rank failed; the same error on all ranks, naming them. With one rank its own error.
        """

    @abstractmethod
    def announce(self, token: str, error: Exception | None, deadline: float) -> None:
        """Tell (leading rank) or learn (others) how the commit went; raises the leader's error on every rank."""


class LocalCoordinator(Coordinator):
    """One rank: every vote is the decision."""

    rank = 0
    world_size = 1

    def agree_on_attempt(self, target: str, deadline: float) -> str:
        """A fresh token."""
        return new_token()

    def collect_votes(
        self, token: str, vote: Mapping[str, Any] | Exception, deadline: float
    ) -> Sequence[Mapping[str, Any]]:
        """The one vote, or its error raised."""
        if isinstance(vote, Exception):
            raise vote
        return [vote]

    def announce(self, token: str, error: Exception | None, deadline: float) -> None:
        """Raise the commit's error, if there is one."""
        if error is not None:
            raise error
