"""Failures that nobody has seen: each is told once, at the next call, with several ranks on all of them together."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any

from ..errors import RanksError
from .pipeline import EarlierSaveFailed

#: A decision that one rank knows reaches the others within this time.
_DECISION_SECONDS = 60.0


class UntoldFailures:
    """Watches the futures of a checkpointer's saves.

    Args:
        patience: seconds to wait for the decision on a save that another rank knows to have failed; None: a minute.
    """

    def __init__(self, patience: float | None = None) -> None:
        self._patience = _DECISION_SECONDS if patience is None else min(patience, _DECISION_SECONDS)
        self._pending: deque[Future[Any]] = deque()

    def watch(self, future: Future[Any]) -> None:
        """One more save."""
        self._pending.append(future)

    @property
    def running(self) -> bool:
        """Whether a save is not over yet."""
        return any(not future.done() for future in self._pending)

    def wait_for_all(self) -> None:
        """Return when all are over; raises the first error on the way."""
        while self._pending:
            self._pending.popleft().result()

    def tell(self) -> None:
        """Raise the first error of an ended save that nobody has seen, once; later saves are not held up by it."""
        failure: BaseException | None = None
        waiting: deque[Future[Any]] = deque()
        while self._pending:
            future = self._pending.popleft()
            if not future.done():
                waiting.append(future)
            elif not getattr(future, "delivered", False):
                error = Future.exception(future, timeout=0)
                if error is not None and failure is None:
                    failure = error
                elif error is not None:
                    waiting.append(future)
        self._pending = waiting
        if failure is not None:
            raise failure

    def by_number(self) -> dict[int, str]:
        """Texts of ended saves that failed without anybody having seen it; forgets those that are over."""
        found: dict[int, str] = {}
        kept: deque[Future[Any]] = deque()
        for future in self._pending:
            if future.done():
                error = Future.exception(future, timeout=0)
                if error is None or getattr(future, "delivered", False):
                    continue
                found[getattr(future, "number", 0)] = str(error)
            kept.append(future)
        self._pending = kept
        return found

    def agreed(self, failure: EarlierSaveFailed) -> BaseException:
        """The error of the save that all ranks are to hear of now."""
        for future in list(self._pending):
            if getattr(future, "number", 0) == failure.number:
                self._pending.remove(future)
                # Another rank knows that it has failed; here the same decision is on its way.
                try:
                    error = future.exception(timeout=self._patience)
                except TimeoutError:
                    break  # its text will do
                if error is not None:
                    return error
        return RanksError(str(failure))
