"""What `TemporalAsyncCaller` and `PersistentAsyncCaller` have in common: calls at work, oldest first."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, CheckpointSaveError, CheckpointTimeoutError
from .async_caller import AsyncCaller
from .call_process import check_start_method
from .call_worker import CallWorker
from .peers import Call, PeerSession
from .pickling import snapshot
from .request import AsyncRequest

#: Beyond the deadlines of a call, what it may take to stop a process that does not react.
_STOP_SECONDS = 10.0


@dataclass(eq=False)
class ScheduledCall(Call):
    """A call of a `ProcessCaller`.

    Attributes:
        worker: None where there was nothing to do, or it failed before a process had it.
        session: with the other ranks; None where there are none.
    """

    worker: CallWorker | None = None
    session: PeerSession | None = None


class ProcessCaller(AsyncCaller):
    """An `AsyncCaller` whose calls run in supervised processes.

    Args:
        start_method: `spawn`, `forkserver` or `fork`.
        start_timeout: seconds for a process to start.
        write_timeout: seconds for one request.
        close_timeout: seconds for a process to leave.

    Raises:
        StartMethodError: `start_method` cannot be used.
    """

    def __init__(
        self,
        start_method: str = "spawn",
        *,
        start_timeout: float = 30.0,
        write_timeout: float = 1800.0,
        close_timeout: float = 60.0,
    ) -> None:
        check_start_method(start_method)
        self._start_method = start_method
        self._start_timeout = start_timeout
        self._write_timeout = write_timeout
        self._close_timeout = close_timeout
        self._calls: deque[ScheduledCall] = deque()

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """See `AsyncCaller.schedule_async_call`."""
        session = self.peers.session()
        allowed = (self._start_timeout + self._write_timeout + _STOP_SECONDS) * (len(self._calls) + 1)
        call = ScheduledCall(f"Request {getattr(async_req, 'call_idx', 0)}", timeout=allowed, session=session)
        try:
            request = AsyncRequest.of(async_req)
            request.check()
            if request.async_fn is None:
                call.result.set_result(None)
            else:
                call.result, call.worker = self._begin(request, _preloaded(request))
        except Exception as error:
            if session is None and not isinstance(error, CheckpointSaveError):
                raise
            call.result.set_exception(error)
        if session is not None:
            session.add(call)
        self._calls.append(call)

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """See `AsyncCaller.is_current_async_call_done`."""
        if not self._calls:
            return True
        call = self._calls[0]
        if no_dist or call.session is None:
            return self._is_done_here(call, blocking)
        try:
            if not call.session.look(call, blocking):
                return False
        except CheckpointError:
            self._calls.popleft()
            self._give_up(call)
            raise
        self._calls.popleft()
        return True

    def close(self, abort: bool = False) -> None:
        """See `AsyncCaller.close`."""
        for worker in self._take_workers():
            if abort:
                worker.abort()
            else:
                worker.close()
        while abort and self._calls:
            call = self._calls.popleft()
            if call.session is not None:
                call.session.give_up(call, CheckpointSaveError(f"{call.what} was given up by close(abort=True)."))
        self.peers.rest()

    @abstractmethod
    def _begin(self, request: AsyncRequest, args: tuple[Any, ...]) -> tuple[Future[Any], CallWorker]:
        """Give a request to a process.

        Raises:
            CheckpointStageError: something cannot be pickled; the text names it and what to do.
            CheckpointSaveError: the system refused another process.
        """

    @abstractmethod
    def _give_up(self, call: ScheduledCall) -> None:
        """What to do with a call that failed on another rank, and may still run here."""

    @abstractmethod
    def _take_workers(self) -> list[CallWorker]:
        """The workers to close; they get no more calls."""

    def _is_done_here(self, call: ScheduledCall, blocking: bool) -> bool:
        if call.session is not None:
            call.session.look_alone()
        if blocking:
            wait([call.result], 0.0 if call.worker is None else call.worker.patience)
        done = call.result.done()
        if not done and not blocking:
            return False
        self._calls.popleft()
        error = call.error() if done else CheckpointTimeoutError(f"{call.what} was not done within its deadline.")
        if call.session is not None:
            if done:
                call.session.finish_alone(call)
            else:
                call.session.give_up(call, CheckpointSaveError(str(error)))
        if error is not None:
            raise error
        return True


def payload_of(request: AsyncRequest, args: tuple[Any, ...]) -> bytes:
    """The call that a request asks for, by value as of now.

    Raises:
        CheckpointStageError: something cannot be pickled; the text names it and what to do.
    """
    return snapshot(
        (request.async_fn, args, request.async_fn_kwargs),
        request.name,
        parts={
            "async_fn": request.async_fn,
            "async_fn_args": args,
            "async_fn_kwargs": request.async_fn_kwargs,
        },
        fix="Use functions from the top level of a module; TemporalAsyncCaller(start_method='fork') pickles nothing.",
    )


def _preloaded(request: AsyncRequest) -> tuple[Any, ...]:
    """The arguments after `preload_fn`, whose failure is that of the call."""
    try:
        return request.preloaded_args()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        raise CheckpointSaveError(
            f"preload_fn of {request.name} failed: {error}", getattr(error, "errno", None)
        ) from error
