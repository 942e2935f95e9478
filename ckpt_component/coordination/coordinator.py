"""One decision on all ranks: the leading rank decides from what every rank says, and every rank learns it.

Three questions are enough for a save or a load: `pool` (everyone says something, rank 0 decides), `lead` (rank 0 alone
does something, all learn the result) and `vote` (everyone says how its part went). With one rank nobody is asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from .calls import Call
from .world import World


class Coordinator(ABC):
    """What a checkpointer needs from all ranks together.

    `rank` is this one's, `world_size` how many there are, and `world` notices when they are others.

    Every rank calls the same methods with the same tags in the same order; values are plain JSON. A tag is used once.
    """

    rank: int
    world_size: int
    world: World

    @property
    def leads(self) -> bool:
        """Whether this rank decides, looks at the file system, and commits."""
        return self.rank == 0

    def at_step(self, step: int) -> None:
        """This rank is at a training step: for the others, should they wait for it. Costs nothing."""

    def resumed(self, step: int) -> None:
        """All ranks go on from an earlier step."""

    @abstractmethod
    def pool(
        self, tag: str, value: Any, decide: Callable[[list[Any]], Any], deadline: float, call: Call | None = None
    ) -> Any:
        """Say something and learn what the leading rank makes of what all said.

        Args:
            tag: of this question.
            value: this rank's.
            decide: called on the leading rank with all values, by rank.
            deadline: monotonic seconds.
            call: what begins with this question, so that a rank which called alone learns it soon (`Meetings`).

        Returns:
            What `decide` returned, on all ranks.

        Raises:
            CheckpointError: what `decide` raised, on all ranks.
            CheckpointTimeoutError: a rank did not say anything in time, or the leading one did not decide.
            RanksError: a rank is gone; or it has gone on without the call.
            AnotherCall: the question was withdrawn by a rank that asked it for another call.
        """

    @abstractmethod
    def deal(self, tag: str, value: Any, decide: Callable[[list[Any]], list[Any]], deadline: float) -> Any:
        """As `pool`, but every rank learns its own part of the decision alone.

        For what has a part for every rank: told as a whole to all, it would cost ranks times ranks.

        Args:
            tag: of this question.
            value: this rank's.
            decide: called on the leading rank with all values, by rank; returns the parts, by rank.
            deadline: monotonic seconds.
        """

    def lead(self, tag: str, action: Callable[[], Any], deadline: float, call: Call | None = None) -> Any:
        """Have the leading rank do something; all learn what it returned or raised.

        Args:
            tag: of this question.
            action: called on the leading rank alone.
            deadline: monotonic seconds.
            call: what begins with this question; see `pool`.
        """
        return action()

    def vote(self, tag: str, work: Callable[[], Any], progress: Callable[[], int], deadline: float) -> list[Any]:
        """Do this rank's part, tell the leading rank, and learn whether every rank's went well.

        Args:
            tag: of this question.
            work: this rank's part.
            progress: bytes written so far, to tell slow from hung.
            deadline: monotonic seconds.

        Returns:
            On the leading rank what `work` returned, by rank. An empty list on the others: to tell them all of it would
            cost ranks times ranks.

        Raises:
            RanksError: a rank's part failed, or a rank is gone; the same on all ranks, naming them.
        """
        return [work()]

    def close(self) -> None:
        """Give up the connections. Safe to call twice."""


class LocalCoordinator(Coordinator):
    """One rank: what it says is the decision."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.world = World()

    def pool(
        self, tag: str, value: Any, decide: Callable[[list[Any]], Any], deadline: float, call: Call | None = None
    ) -> Any:
        """What `decide` makes of the one value."""
        return decide([value])

    def deal(self, tag: str, value: Any, decide: Callable[[list[Any]], list[Any]], deadline: float) -> Any:
        """The one part of what `decide` makes of the one value."""
        return decide([value])[0]
