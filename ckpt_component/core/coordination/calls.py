"""Calls that every rank must make: report which ranks have not, and where they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import CheckpointTimeoutError, RanksError
from .coordinator import Coordinator
from .heartbeat import Place, place_of
from .rank_store import RankStore

logger = logging.getLogger("ckpt_component.coordination")

#: In seconds: how often a waiting rank checks where the missing ranks are, and when it warns, once.
_LOOK_SECONDS, _WARN_SECONDS = 1.0, 10.0
#: How many of the missing ranks are checked, and how many a message names.
_ASKED, _NAMED = 256, 8


class StepQuestions:
    """Questions that only rank 0 answers, one per call of a method that takes a step.

    Args:
        ranks: the ranks that must call
        name: the method's name
    """

    def __init__(self, ranks: Coordinator, name: str) -> None:
        self._ranks = ranks
        self._name = name
        self.restart(0)

    def restart(self, turn: int) -> None:
        """Restart from an earlier step, on all ranks; `turn` distinguishes the new questions from earlier ones."""
        self._tag = f"{self._name}/{turn}"
        self._number = 0
        self._ahead: list[Any] | None = None  # rank 0's answer for a step that this rank has not reached

    def ask(self, step: int, action: Callable[[], Any], deadline: float) -> Any:
        """Like `Coordinator.run_on_leader`, for this step. Skips answers for steps that only rank 0 called for.

        Raises:
            RanksError: rank 0 did not call for this step
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
    """Checks, for a rank that waits in a call, where the ranks are that have not called.

    Args:
        store: connection of the waiting rank
        name: the method that was called
        place: where this rank is
        missing: returns the ranks that have not called
        waits_for: returns those of them that this rank waits for
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
        self._outside = store.outside
        self._name = name
        self._place = place
        self._missing = missing
        self._waits_for = waits_for
        self._began = self._outside.now()
        self._next = self._began + _LOOK_SECONDS
        self._warned = False

    def look(self) -> None:
        """Check, at most once a second; warn once, after ten seconds.

        Raises:
            RanksError: a rank has continued and will not make the call
        """
        now = self._outside.now()
        if now < self._next:
            return
        places = self._places(self._waits_for())
        self._next = self._outside.now() + _LOOK_SECONDS
        past = {rank: str(place) for rank, place in places.items() if place is not None and place.is_past(self._place)}
        if past:
            raise RanksError(f"{self._text()}.", None, past)
        if places and not self._warned and now - self._began >= _WARN_SECONDS:
            self._warned = True
            logger.warning("waiting for %.0f s: %s", now - self._began, self._text())

    def explain(self, error: CheckpointTimeoutError) -> CheckpointTimeoutError:
        """Return the error of the wait, which names the ranks that did not call."""
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
