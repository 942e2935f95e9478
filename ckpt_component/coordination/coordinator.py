"""One decision on all ranks: the leader decides from every rank's value, and every rank gets the decision.

A save or a load asks in five ways:

- `decide`: every rank sends a value, rank 0 decides.
- `meet`: the same, at the beginning of a call that all ranks must make.
- `scatter`: the same, with a part of the decision for each rank.
- `run_on_leader`: rank 0 alone does something, all ranks get the result.
- `all_succeed`: every rank does its part and learns whether all parts succeeded.

With one rank, all of them are plain calls.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..errors import CheckpointWorldError


class Coordinator(ABC):
    """What a checkpointer needs from all ranks together.

    Every rank calls the same methods with the same tags in the same order; values are plain JSON. A tag is used once.

    Args:
        rank: this one's number.
        world_size: how many there are.

    Attributes:
        meetings: by name, how many questions `meet` has asked; alike on all ranks that have called.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.meetings: Counter[str] = Counter()
        dist = distributed()
        # Weak, so that destroy_process_group() is not held up.
        self._group = None if dist is None else weakref.ref(dist.group.WORLD)

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides, looks at the file system, and commits."""
        return self.rank == 0

    def check_world(self) -> None:
        """Compare the default process group with the one at the time this was built, without a message.

        None at all is right too: after `destroy_process_group()` the ranks keep connections of their own to the store.

        Raises:
            CheckpointWorldError: what was built then is of no use now.
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
        """Note the training step of this rank, for ranks that wait for it. Costs nothing."""

    def resumed(self, step: int) -> None:
        """All ranks continue from an earlier step."""

    @abstractmethod
    def decide(self, tag: str, value: Any, decide: Callable[[list[Any]], Any], deadline: float) -> Any:
        """Send a value to the leader and return the leader's decision.

        Args:
            tag: of this question.
            value: this rank's.
            decide: called on the leader with all values, by rank.
            deadline: monotonic seconds.

        Returns:
            What `decide` returned, on all ranks.

        Raises:
            CheckpointError: what `decide` raised, on all ranks.
            CheckpointTimeoutError: a rank did not send its value in time, or the leader did not decide.
            RanksError: a rank is dead.
        """

    @abstractmethod
    def meet(
        self, name: str, value: Any, decide: Callable[[list[Any]], Any], deadline: float, about: str | None = None
    ) -> Any:
        """As `decide`, where a call begins that all ranks must make; a rank that made it alone learns so soon.

        The questions of a name are numbered. One that a rank withdrew, because it was alone, keeps its number.

        Args:
            name: of the method that was called.
            value: this rank's.
            decide: called on the leader with all values, by rank.
            deadline: monotonic seconds.
            about: distinguishes the call from others of the method; None: where in its run the rank is.

        Raises:
            RanksError: a rank has gone on without the call. For the rest see `decide`.
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
    def run_on_leader(self, tag: str, action: Callable[[], Any], deadline: float, name: str | None = None) -> Any:
        """Have the leader do something; all ranks get what it returned or raised.

        Args:
            tag: of this question.
            action: called on the leader alone.
            deadline: monotonic seconds.
            name: of the method whose call begins with this question; see `meet`.
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

    def __init__(self) -> None:
        super().__init__(0, 1)

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
        """Do it."""
        return action()

    def all_succeed(self, tag: str, work: Callable[[], Any], progress: Callable[[], int], deadline: float) -> list[Any]:
        """Do it."""
        return [work()]


def distributed() -> ModuleType | None:
    """`torch.distributed` where the script has initialized it, else None."""
    dist = sys.modules.get("torch.distributed")  # a user of it has imported it
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist
