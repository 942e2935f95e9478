"""`AsyncCaller`: runs requests in the background and says when one is done on all ranks (seed 002)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, CheckpointSaveError, CheckpointTimeoutError
from ..process.call_worker import CallWorker
from ..process.snapshot import snapshot
from .ranks import sum_over_ranks
from .request import AsyncRequest, agree_on_failure


class AsyncCaller(ABC):
    """Runs the `async_fn` of requests in another process.

    The calls of one caller are asked about in the order in which they were scheduled; the *current* call is the first
    that was not yet reported as done.
    """

    @abstractmethod
    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Run a request in the background. Call this on all ranks.

        Everything that the request needs is taken by value before this returns, and `preload_fn` has run.

        Args:
            async_req: without `async_fn` it is done at once.

        Raises:
            CheckpointStageError: something of the request cannot be sent to another process.
            StartMethodError: fork where CUDA is in use.
        """

    @abstractmethod
    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether the current call is done on all ranks. Call this on all ranks.

        Args:
            blocking: wait until it is done, at most as long as its deadline allows.
            no_dist: look at this rank alone.

        Returns:
            True when it is done, or nothing is scheduled.

        Raises:
            CheckpointSaveError: the call failed, here or on another rank; raised once. The call is then over, and the
                next one is the current one.
        """

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """Whether no rank has a call at work. Call this on all ranks.

        Args:
            is_alive: nonzero when this rank's current call is not done.
        """
        return sum_over_ranks(int(bool(is_alive))) == 0

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """End the processes. Bounded; safe to call twice; the caller can be used again.

        Args:
            abort: kill them now and forget their calls. Otherwise they finish first, each within its deadline.
        """


@dataclass
class _Call:
    what: str
    result: Future[Any]
    worker: CallWorker | None  # None for a call that is over already

    def error(self) -> CheckpointError | None:
        """Why it failed, of this package's family whatever it was."""
        error = self.result.exception(0)
        if error is None or isinstance(error, CheckpointError):
            return error
        told = CheckpointSaveError(f"{self.what} could not be run: {type(error).__name__}: {error}")
        told.__cause__ = error
        return told


class PendingCalls:
    """The calls of one caller that were not yet reported as done, oldest first."""

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque()

    def add(self, request: AsyncRequest, result: Future[Any], worker: CallWorker) -> None:
        """A call that `worker` has been given."""
        self._calls.append(_Call(name_of(request), result, worker))

    def add_over(self, request: AsyncRequest, error: BaseException | None) -> None:
        """A call that there was nothing to do for, or that failed before a process had it."""
        result: Future[Any] = Future()
        if error is None:
            result.set_result(None)
        else:
            result.set_exception(error)
        self._calls.append(_Call(name_of(request), result, None))

    def workers(self) -> list[CallWorker]:
        """Those that have, or had, one of these calls."""
        return list(dict.fromkeys(call.worker for call in self._calls if call.worker is not None))

    def forget(self) -> None:
        """Their results go nowhere."""
        self._calls.clear()

    def first_is_done(self, caller: AsyncCaller, blocking: bool, no_dist: bool) -> bool:
        """What `AsyncCaller.is_current_async_call_done` promises."""
        call = self._calls[0] if self._calls else None
        patience = call.worker.patience if call is not None and call.worker is not None else 0.0
        deadline = time.monotonic() + patience
        if blocking and call is not None:
            wait([call.result], patience)
        while True:
            alive = call is not None and not call.result.done()
            done = not alive if no_dist else caller.sync_all_async_calls(int(alive))
            if done or not blocking:
                break
            if call is not None and alive and time.monotonic() >= deadline:
                self._calls.popleft()
                raise CheckpointTimeoutError(f"{call.what} was not done within its deadline.")
        if not done:
            return False
        error = None if call is None else call.error()
        if call is not None:
            self._calls.popleft()
        if not no_dist:
            agree_on_failure(error, "The call" if call is None else call.what)
        elif error is not None:
            raise error
        return True


def name_of(request: AsyncRequest) -> str:
    """How error texts call a request."""
    return f"Request {request.call_idx}"


def payload_of(request: AsyncRequest, args: tuple[Any, ...]) -> bytes:
    """The call that a request asks for, by value as of now.

    Raises:
        CheckpointStageError: something cannot be pickled; the text names it and what to do.
    """
    return snapshot(
        (request.async_fn, args, request.async_fn_kwargs),
        name_of(request),
        parts={
            "async_fn": request.async_fn,
            "async_fn_args": args,
            "async_fn_kwargs": request.async_fn_kwargs,
        },
        fix="Use functions from the top level of a module; TemporalAsyncCaller(start_method='fork') pickles nothing.",
    )


def preload(request: AsyncRequest) -> tuple[Any, ...] | CheckpointSaveError:
    """The arguments after `preload_fn`, or the error of this call when that raised."""
    try:
        return request.preloaded_args()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        failure = CheckpointSaveError(
            f"preload_fn of {name_of(request)} failed: {error}", getattr(error, "errno", None)
        )
        failure.__cause__ = error
        return failure
