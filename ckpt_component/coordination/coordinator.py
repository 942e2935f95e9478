"""One decision on all ranks: the leader decides from every rank's value, and every rank gets the decision.

A save or a load asks in four ways:

- `decide`: every rank sends a value, rank 0 decides.
- `scatter`: the same, with a part of the decision for each rank.
- `run_on_leader`: rank 0 alone does something, all ranks get the result.
- `all_succeed`: every rank does its part and learns whether all parts succeeded.

With one rank, all of them are plain calls.
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
    def is_leader(self) -> bool:
        """Whether this rank decides, looks at the file system, and commits."""
        return self.rank == 0

    def at_step(self, step: int) -> None:
        """Note the training step of this rank, for ranks that wait for it. Costs nothing."""

    def resumed(self, step: int) -> None:
        """All ranks continue from an earlier step."""

    @abstractmethod
    def decide(
        self, tag: str, value: Any, decide: Callable[[list[Any]], Any], deadline: float, call: Call | None = None
    ) -> Any:
        """Send a value to the leader and return the leader's decision.

        Args:
            tag: of this question.
            value: this rank's.
            decide: called on the leader with all values, by rank.
            deadline: monotonic seconds.
            call: what begins with this question, so that a rank which called alone learns it soon (`Meetings`).

        Returns:
            What `decide` returned, on all ranks.

        Raises:
            CheckpointError: what `decide` raised, on all ranks.
            CheckpointTimeoutError: a rank did not send its value in time, or the leader did not decide.
            RanksError: a rank is dead, or it has gone on without the call.
            AnotherCall: the question was withdrawn by a rank that asked it for another call.
        """

    @abstractmethod
    def scatter(self, tag: str, value: Any, decide: Callable[[list[Any]], list[Any]], deadline: float) -> Any:
        """As `decide`, but each rank gets only its own part of the decision.

        Sending all parts to all ranks would cost ranks times ranks.

        Args:
            tag: of this question.
            value: this rank's.
            decide: called on the leader with all values, by rank; returns the parts, by rank.
            deadline: monotonic seconds.
        """

    @abstractmethod
    def run_on_leader(self, tag: str, action: Callable[[], Any], deadline: float, call: Call | None = None) -> Any:
        """Have the leader do something; all ranks get what it returned or raised.

        Args:
            tag: of this question.
            action: called on the leader alone.
            deadline: monotonic seconds.
            call: what begins with this question; see `decide`.
        """

    @abstractmethod
    def all_succeed(self, tag: str, work: Callable[[], Any], progress: Callable[[], int], deadline: float) -> list[Any]:
        """Do this rank's part and learn whether every rank's part succeeded.

        Args:
            tag: of this question.
            work: this rank's part.
            progress: bytes written so far, to tell slow from hung.
            deadline: monotonic seconds.

        Returns:
            On the leader what `work` returned, by rank. An empty list on the others: sending it to all would cost
            ranks times ranks.

        Raises:
            RanksError: a rank's part failed, or a rank is dead; the same on all ranks, naming them.
        """

    def close(self) -> None:
        """Give up the connections. Safe to call twice."""


class LocalCoordinator(Coordinator):
    """One rank: it leads, and its value is the only one."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.world = World()

    def decide(
        self, tag: str, value: Any, decide: Callable[[list[Any]], Any], deadline: float, call: Call | None = None
    ) -> Any:
        """Decide from the one value."""
        return decide([value])

    def scatter(self, tag: str, value: Any, decide: Callable[[list[Any]], list[Any]], deadline: float) -> Any:
        """Decide from the one value; there is one part."""
        return decide([value])[0]

    def run_on_leader(self, tag: str, action: Callable[[], Any], deadline: float, call: Call | None = None) -> Any:
        """Do it."""
        return action()

    def all_succeed(self, tag: str, work: Callable[[], Any], progress: Callable[[], int], deadline: float) -> list[Any]:
        """Do it."""
        return [work()]
