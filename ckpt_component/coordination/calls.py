"""What every rank must call: who has not, and where that rank is instead."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import CheckpointTimeoutError, RanksError
from .coordinator import Coordinator
from .heartbeat import Place, place_of
from .rank_store import RankStore

logger = logging.getLogger(__name__)

#: A rank that waits looks this often where the others are, and warns once after this long.
_LOOK_SECONDS, _WARN_SECONDS = 1.0, 10.0
#: How many of the missing ranks a look asks for, and how many a message names.
_ASKED, _NAMED = 256, 8


class StepQuestions:
    """Questions that rank 0 alone answers, one for each call of a method with a step.

    Args:
        ranks: who has to call.
        name: of the method.
    """

    def __init__(self, ranks: Coordinator, name: str) -> None:
        self._ranks = ranks
        self._name = name
        self.restart(0)

    def restart(self, turn: int) -> None:
        """Steps begin again, on all ranks; the number of the turn distinguishes the questions from those before."""
        self._tag = f"{self._name}/{turn}"
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
                self._ahead = self._ranks.run_on_leader(tag, lambda: [step, action()], deadline, self._name)
                self._number += 1
            reached, answer = self._ahead
            if reached > step:
                raise RanksError(
                    f"{self._name} must be called on every rank; rank 0 did not for step {step}: "
                    f"it is at step {reached}."
                )
            self._ahead = None
            if reached == step:
                return answer


class Lookout:
    """Looks after the ranks that are missing in a call, for one that waits there.

    Args:
        store: of the rank that waits.
        name: of the method that was called.
        place: where this rank is.
        missing: the ranks that have not called.
        waits_for: those of them that this rank looks after.
    """

    def __init__(
        self,
        store: RankStore,
        name: str,
        place: Place,
        missing: Callable[[], list[int]],
        waits_for: Callable[[], list[int]],
    ) -> None:
        self._store = store
        self._name = name
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

    def explain(self, error: CheckpointTimeoutError) -> CheckpointTimeoutError:
        """The error of the wait; it names those who did not call."""
        return CheckpointTimeoutError(f"Timed out: {self._text()}.") if self._missing() else error

    def _places(self, ranks: list[int]) -> Mapping[int, Place | None]:
        return {rank: place_of(self._store, rank) for rank in ranks[:_ASKED]}

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
        return f"{self._name} must be called on every rank; {ranks} did not{step}: {', '.join(where)}"

    def _where(self, place: Place | None) -> str:
        if place is None:
            return "has sent no heartbeat"
        return f"{place} too, and late" if place == self._place and place.step is not None else str(place)
