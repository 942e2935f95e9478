"""What every rank must call: who has not, and where that rank is instead; and how a call by one rank is taken back."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, CheckpointTimeoutError, RanksError
from .rank_store import RankStore

if TYPE_CHECKING:
    from .coordinator import Coordinator

logger = logging.getLogger(__name__)

#: A rank that waits looks this often where the others are, and warns once after this long.
_LOOK_SECONDS, _WARN_SECONDS = 1.0, 10.0
#: How many of the missing ranks a look asks for, and how many a message names.
_ASKED, _NAMED = 256, 8


@dataclass(frozen=True)
class Call:
    """A call that all ranks make together.

    Attributes:
        name: of the method.
        about: distinguishes it from other calls of the method; None: where in its run the rank is.
    """

    name: str
    about: str | None = None


@dataclass(frozen=True)
class Place:
    """Where a rank is in its run.

    Attributes:
        turn: how often it went back to an earlier step.
        step: the last training step that it named; None: none yet.
        closed: it saves and restores nothing more.
    """

    turn: int = 0
    step: int | None = None
    closed: bool = False

    def at(self, step: int) -> Place:
        """The place of the same rank at this step."""
        step = int(step)  # it becomes JSON
        return Place(self.turn + (self.step is not None and step < self.step), step)

    def is_past(self, other: Place) -> bool:
        """Whether a rank here no longer comes to what a rank at `other` does now. Old news never says so."""
        if self.closed:
            return True
        return self.turn == other.turn and self.step is not None and (other.step is None or self.step > other.step)

    def as_plain(self) -> list[Any]:
        """As JSON, for a heartbeat."""
        return [self.turn, self.step, self.closed]

    def __str__(self) -> str:
        if self.closed:
            return "has closed its manager"
        return "has not called the manager for any step" if self.step is None else f"is at step {self.step}"


class AnotherCall(Exception):
    """A question was withdrawn by a rank that asked it for another call; this one is for the next question."""


class Meetings:
    """Numbers the questions with which the calls of one method begin; a call that was withdrawn keeps its number.

    Args:
        ranks: who has to meet.
        name: of the method.

    Attributes:
        number: of the last question, from 1; alike on all ranks that have called.
    """

    def __init__(self, ranks: Coordinator, name: str) -> None:
        self._ranks = ranks
        self._name = name
        self.number = 0

    @property
    def tag(self) -> str:
        """Of the last question."""
        return f"{self._name}/{self.number}"

    def ask(self, value: Any, decide: Callable[[list[Any]], Any], deadline: float, about: str | None = None) -> Any:
        """As `Coordinator.decide`, with the next number; see `Call` for `about`."""
        while True:
            self.number += 1
            try:
                return self._ranks.decide(self.tag, value, decide, deadline, Call(self._name, about))
            except AnotherCall:
                logger.debug("%s was withdrawn", self.tag)


class StepQuestions:
    """Questions that rank 0 alone answers, one for each call of a method with a step.

    Args:
        ranks: who has to call.
        name: of the method.
    """

    def __init__(self, ranks: Coordinator, name: str) -> None:
        self._ranks = ranks
        self._name = name
        self.restart("")

    def restart(self, tag: str) -> None:
        """Steps begin again, on all ranks; the tag distinguishes the questions from those before."""
        self._tag = f"{tag}/{self._name}"
        self._number = 0
        self._ahead: list[Any] | None = None  # rank 0's answer for a step to which this rank has not come

    def ask(self, step: int, action: Callable[[], Any], deadline: float) -> Any:
        """As `Coordinator.run_on_leader`, for this step. What rank 0 answered when it called alone is passed over.

        Raises:
            RanksError: rank 0 did not call for this step.
        """
        while True:
            if self._ahead is None:
                tag = f"{self._tag}/{self._number + 1}"
                self._ahead = self._ranks.run_on_leader(tag, lambda: [step, action()], deadline, Call(self._name))
                self._number += 1
            asked, answer = self._ahead
            if asked > step:
                raise RanksError(
                    f"{self._name} must be called on every rank; rank 0 did not for step {step}: it is at step {asked}."
                )
            self._ahead = None
            if asked == step:
                return answer


class Lookout:
    """Looks after the ranks that are missing in a call, for one that waits there.

    Args:
        store: of the rank that waits.
        call: that it made.
        place: where it is.
        missing: the ranks that have not called.
        waits_for: those of them that this rank looks after.
    """

    def __init__(
        self,
        store: RankStore,
        call: Call,
        place: Place,
        missing: Callable[[], list[int]],
        waits_for: Callable[[], list[int]],
    ) -> None:
        self._store = store
        self._call = call
        self._place = place
        self._missing = missing
        self._waits_for = waits_for
        self._began = time.monotonic()
        self._next = self._began + _LOOK_SECONDS
        self._warned = False

    def look(self) -> None:
        """Look at most every second; warn once after ten.

        Raises:
            RanksError: a rank has gone on, and will not come.
        """
        now = time.monotonic()
        if now < self._next:
            return
        places = self._places(self._waits_for())
        self._next = time.monotonic() + _LOOK_SECONDS
        past = {rank: str(place) for rank, place in places.items() if place is not None and place.is_past(self._place)}
        if past:
            raise RanksError(f"{self._text()}.", None, past)
        if places and not self._warned and now - self._began >= _WARN_SECONDS:
            self._warned = True
            logger.warning("waiting for %.0f s: %s", now - self._began, self._text())

    def explain(self, error: CheckpointError) -> CheckpointError:
        """The error of the wait; when its time was up, it names those who did not call."""
        if not isinstance(error, CheckpointTimeoutError) or not self._missing():
            return error
        return CheckpointTimeoutError(f"Timed out: {self._text()}.")

    def _places(self, ranks: list[int]) -> Mapping[int, Place | None]:
        found: dict[int, Place | None] = {}
        for rank in ranks[:_ASKED]:
            sign = self._store.peek(f"beat/{rank}")
            found[rank] = None if sign is None else Place(*json.loads(sign)[2:])
        return found

    def _text(self) -> str:
        missing = self._missing()
        first = missing[:_NAMED]
        one = len(missing) == 1
        more = f" (and {len(missing) - _NAMED} more)" if len(missing) > _NAMED else ""
        ranks = ("rank " if one else "ranks ") + ", ".join(map(str, first)) + more
        step = "" if self._place.step is None else f" for step {self._place.step}"
        where = [
            f"{'it' if one else f'rank {rank}'} {self._where(place)}" for rank, place in self._places(first).items()
        ]
        return f"{self._call.name} must be called on every rank; {ranks} did not{step}: {', '.join(where)}"

    def _where(self, place: Place | None) -> str:
        if place is None:
            return "has sent no heartbeat"
        return f"{place} too, and late" if place == self._place and place.step is not None else str(place)
