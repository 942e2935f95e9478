"""Agreement of ranks that must not wait for each other: they vote, go on, and look now and then who else has."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...errors import CheckpointError, error_as_plain
from .heartbeat import RESTING, FailureDetector
from .question import unpack
from .store_coordinator import StoreCoordinator

logger = logging.getLogger("ckpt_component.coordination")


class PolledCoordinator(StoreCoordinator):
    """A coordinator for queues of calls, which may also rest while none is open. Arguments as for its base class."""

    def is_counted(self, tag: str, watch: FailureDetector) -> bool:
        """On the leader: whether `count` would not wait. Pass the same `watch` in every call."""
        return self._question(tag).is_over(watch, {})

    def look(self, tag: str, number: int, is_over: Callable[[], bool], deadline: float) -> bool:
        """Whether something is over; looks of the same number return the same on all ranks.

        A rank waits only until the leader has made this look. All ranks call `leave` after the last one.

        Args:
            tag: names this series of looks
            number: number of this look, from 0
            is_over: called on the leader; once it has returned True, the leader makes no more looks
            deadline: monotonic seconds
        """
        question = self._question(tag)
        if self.is_leader:
            over = is_over()
            question.answer(result=[number, over])
            return over
        data = self._await_answer(question, deadline, reached=lambda data: unpack(data)["result"][0] >= number)
        return bool(unpack(data)["result"] == [number, True])

    def refuse(self, tag: str, failure: CheckpointError) -> None:
        """On the leader: answer a question with an error, whatever the ranks post. Does not wait."""
        question = self._question(tag)
        question.answer(error=error_as_plain(failure))
        self._answered.add(question)

    def leave(self, tag: str) -> None:
        """Declare that this rank has no more use for a question; its keys are removed when all ranks have left it."""
        self._leave(self._question(tag), answered=False)

    def rest(self) -> None:
        """Like `close`, but the other ranks do not consider this one dead: it may start another coordinator."""
        self.close()
        try:
            self._first.until(self.outside.now()).set(f"beat/{self.rank}", RESTING)
        except CheckpointError as error:
            logger.debug("%s", error)
