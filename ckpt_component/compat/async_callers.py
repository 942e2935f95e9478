"""The callers of the reference: they run requests in other processes and say when one is done on all ranks."""

from __future__ import annotations

import logging
import pickle
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

from ..errors import CheckpointError, CheckpointSaveError
from .async_request import AsyncRequest
from .peers import Peers, ScheduledCall, this_rank
from .pickling import pickle_by_value
from .worker_client import WorkerClient
from .worker_main import Call, serve_calls, serve_inherited_call
from .worker_process import check_start_method

logger = logging.getLogger(__name__)

#: What it may take to stop a process that does not react.
_STOP_SECONDS = 10.0


class AsyncCaller(ABC):
    """Runs the `async_fn` of requests in another process.

    The calls of one caller are asked about in the order in which they were scheduled; the *current* call is the first
    that was not yet reported as done.
    """

    @cached_property
    def peers(self) -> Peers:
        """The callers of the other ranks. The callers of one queue share this."""
        return Peers()

    @abstractmethod
    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Run a request in the background. Call this on all ranks.

        Everything that the request needs is taken by value before this returns, and `preload_fn` has run. Waits for
        no other rank: with several, a request that cannot be scheduled on one of them is a call that failed there,
        which all ranks learn when they ask about it.

        Args:
            async_req: without `async_fn` there is nothing to run.

        Raises:
            CheckpointStageError: something of the request cannot be sent to another process; with one rank.
            StartMethodError: fork where CUDA is in use; with one rank.
            RanksError: the store that all ranks share cannot be reached.
        """

    @abstractmethod
    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether the current call is done on all ranks. Call this on all ranks, in the same way.

        All ranks get the same answer to the n-th question, without a collective: it is the one that rank 0 got.

        Args:
            blocking: wait until it is done, at most as long as its deadline allows.
            no_dist: look at this rank alone.

        Returns:
            True when it is done, or nothing is scheduled.

        Raises:
            CheckpointSaveError: the call failed; raised once. The call is then over, and the next one is the current
                one. With several ranks it is a RanksError, the same on all of them as soon as one has failed; where
                the call failed, that error is the cause.
            CheckpointTimeoutError: the call, or rank 0's decision, did not come before the deadline.
        """

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """Whether no rank has a call at work; waits for all ranks. Call this on all ranks.

        Args:
            is_alive: nonzero when this rank's current call is not done.
        """
        session = self.peers.session()
        alive = int(bool(is_alive))
        return (alive if session is None else session.total(alive)) == 0

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """End the processes. Bounded; safe to call twice; the caller can be used again.

        Args:
            abort: kill them now and forget their calls. Otherwise they finish first, each within its deadline.
        """


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
        self._write_timeout = write_timeout
        self._calls: deque[ScheduledCall] = deque()
        self._longest_call = start_timeout + write_timeout + _STOP_SECONDS
        self._make_client = partial(
            WorkerClient, start_method=start_method, start_timeout=start_timeout, close_timeout=close_timeout
        )

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Run a request in the background."""
        session = self.peers.session()
        timeout = self._longest_call * (len(self._calls) + 1)
        call = ScheduledCall(f"Request {getattr(async_req, 'call_idx', 0)}", timeout, session=session)
        try:
            function_call = AsyncRequest.of(async_req).preloaded_call()
            if function_call is None:
                call.result.set_result(None)
            else:
                call.result, call.worker = self._begin(call.what, function_call)
        except Exception as error:
            if session is None and not isinstance(error, CheckpointSaveError):
                raise
            call.result.set_exception(error)
        if session is not None:
            session.add(call)
        self._calls.append(call)

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether the current call is done on all ranks."""
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
        """End the processes."""
        for worker in self._take_workers():
            if abort:
                worker.abort()
            else:
                worker.close()
        while abort and self._calls:
            call = self._calls.popleft()
            if call.session is not None:
                call.session.give_up(call, CheckpointSaveError(f"{call.what} was given up by close(abort=True)."))
        if self.peers.current is not None:
            self.peers.current.rest()

    @abstractmethod
    def _begin(self, what: str, call: Call) -> tuple[Future[Any], WorkerClient]:
        """Give a call to a process.

        Raises:
            CheckpointStageError: something cannot be pickled; the message names it and what to do.
            CheckpointSaveError: the system refused another process.
        """

    @abstractmethod
    def _give_up(self, call: ScheduledCall) -> None:
        """What to do with a call that failed on another rank, and may still run here."""

    @abstractmethod
    def _take_workers(self) -> list[WorkerClient]:
        """The workers to close; they get no more calls."""

    def _is_done_here(self, call: ScheduledCall, blocking: bool) -> bool:
        if blocking:
            call.wait()
        elif not call.result.done():
            return False
        self._calls.popleft()
        error = call.error()
        if error is not None:
            raise error
        return True


class TemporalAsyncCaller(ProcessCaller):
    """Starts a process for each request; several may run at the same time.

    With several ranks, a request that failed on another one is killed here, so that nothing writes into a save that is
    over.

    Args:
        start_method: `spawn` or `forkserver` import the modules of `async_fn` afresh, which takes seconds where they
            import torch. `fork` starts in milliseconds and pickles nothing, but makes the next update of the weights
            slow, page by page, shares memory that was shared before, and is refused where CUDA is in use.
        start_timeout: seconds for a process to start.
        write_timeout: seconds for one request.
        close_timeout: seconds for a process to leave when it is done.

    Raises:
        StartMethodError: `start_method` cannot be used.
    """

    def _begin(self, what: str, call: Call) -> tuple[Future[Any], WorkerClient]:
        if self._start_method == "fork":
            loop: Callable[..., None] = partial(serve_inherited_call, call=call)
            payload = pickle.dumps(None)
        else:
            loop, payload = partial(serve_calls, log_level=_log_level()), _payload_of(what, call)
        worker = self._make_client(loop, name="temporal checkpoint process")
        worker.start()  # from here, so that a forked process has the state of this moment
        result = worker.submit(payload, timeout=self._write_timeout, what=what)
        worker.finish()  # its process ends with this request
        return result, worker

    def _give_up(self, call: ScheduledCall) -> None:
        if call.worker is not None:
            call.worker.abort()

    def _take_workers(self) -> list[WorkerClient]:
        return [call.worker for call in self._calls if call.worker is not None]


class PersistentAsyncCaller(ProcessCaller):
    """Sends requests to one process, which is started with the first of them.

    Requests may wait for each other. One that fails fails alone; one that kills the process fails, and the next one
    gets a new process. With several ranks, a request that failed on another one is skipped here, or runs to its end if
    it has begun: the next one comes after it, so that the two never write at the same time.

    Args:
        start_method: `spawn` or `forkserver`; `fork` is refused where CUDA is in use.
        start_timeout: seconds for the process to start.
        write_timeout: seconds for one request, from the moment when the process gets it.
        close_timeout: seconds for the process to leave when it is asked to.

    Raises:
        StartMethodError: `start_method` cannot be used.
    """

    _worker: WorkerClient | None = None

    @property
    def pid(self) -> int | None:
        """The process's id, or None when none runs."""
        process = self._worker.process if self._worker is not None else None
        return process.pid if process is not None else None

    def warm_up(self) -> None:
        """Start the process now, so that the first request need not wait for it. Does not wait itself.

        Raises:
            CheckpointSaveError: the system refused another process.
        """
        self._open_worker().start()

    @staticmethod
    def async_loop(rank: int, sock: socket.socket, log_level: int = logging.INFO) -> None:
        """What the process runs: it takes requests from the trainer and answers each under its number.

        Args:
            rank: of the trainer.
            sock: to the trainer. It carries requests, results and errors; the reference has three queues here.
            log_level: of this package's loggers in the process.
        """
        logger.debug("persistent checkpoint process of rank %d", rank)
        serve_calls(sock, log_level)

    def _begin(self, what: str, call: Call) -> tuple[Future[Any], WorkerClient]:
        payload = _payload_of(what, call)
        worker = self._open_worker()
        return worker.submit(payload, timeout=self._write_timeout, what=what), worker

    def _give_up(self, call: ScheduledCall) -> None:
        call.result.cancel()  # does nothing to a call that runs

    def _take_workers(self) -> list[WorkerClient]:
        worker, self._worker = self._worker, None
        return [] if worker is None else [worker]

    def _open_worker(self) -> WorkerClient:
        if self._worker is None:
            loop = partial(PersistentAsyncCaller.async_loop, this_rank(), log_level=_log_level())
            self._worker = self._make_client(loop, name="persistent checkpoint process")
        return self._worker


def _log_level() -> int:
    """Of this package's loggers, for the processes."""
    return logging.getLogger("ckpt_component").getEffectiveLevel()


def _payload_of(what: str, call: Call) -> bytes:
    """A call by value, as of now.

    Raises:
        CheckpointStageError: something cannot be pickled; the message names it and what to do.
    """
    return pickle_by_value(
        call,
        what,
        parts=dict(zip(("async_fn", "async_fn_args", "async_fn_kwargs"), call, strict=True)),
        fix="Use functions from the top level of a module; TemporalAsyncCaller(start_method='fork') pickles nothing.",
    )
