"""The callers of the reference. They run requests in other processes and report when one is done on all ranks."""

from __future__ import annotations

import logging
import pickle
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from ..core.options import NICE, IoPriority
from ..core.outside import OUTSIDE, Future, Socket
from ..errors import CheckpointError, CheckpointSaveError
from .async_request import AsyncRequest
from .peers import Peers, ScheduledCall, this_rank
from .pickling import pickle_by_value
from .worker_client import STOP_SECONDS, WorkerClient, check_start_method
from .worker_main import Call, run_call, serve, serve_calls

logger = logging.getLogger(__name__)


class AsyncCaller(ABC):
    """Runs the `async_fn` of requests in another process.

    Calls are reported in the order in which they were scheduled. The *current* call is the first that has not been
    reported as done.
    """

    @cached_property
    def peers(self) -> Peers:
        """The other ranks; shared by the callers of one queue."""
        return Peers()

    @abstractmethod
    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Run a request in the background. Call this on all ranks.

        When this returns, `preload_fn` has run and everything that the request needs has been copied. Does not wait for
        other ranks: a request that cannot be scheduled on one of several ranks is a call that failed there, and all
        ranks get the error when they ask for its result.

        Args:
            async_req: the request; without `async_fn` there is nothing to run

        Raises:
            CheckpointStageError: with one rank, a part of the request cannot be sent to another process
            StartMethodError: with one rank, fork in a process that uses CUDA
            RanksError: the store of the ranks cannot be reached
        """

    @abstractmethod
    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether the current call is done on all ranks. Call this on all ranks, in the same way.

        All ranks get rank 0's answer to the n-th call of this, without a collective.

        Args:
            blocking: wait until it is done, at most until its deadline
            no_dist: look only at this rank

        Returns:
            True when it is done, or nothing is scheduled.

        Raises:
            CheckpointSaveError: the call failed; raised once. The next call is then the current one. With several
                ranks it is the same RanksError on all of them as soon as one has failed, caused by the rank's own
                error where the call failed.
            CheckpointTimeoutError: timed out waiting for the call or for rank 0's decision
        """

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """Whether no rank has a running call. Call this on all ranks; waits for them.

        Args:
            is_alive: nonzero if this rank's current call is not done
        """
        session = self.peers.session()
        alive = int(bool(is_alive))
        return (alive if session is None else session.total(alive)) == 0

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """End the processes. Bounded and safe to call twice; the caller can be used again.

        Args:
            abort: kill them now and discard their calls. Otherwise they finish first, each within its deadline.
        """

    @abstractmethod
    def __del__(self) -> None:
        """Let go of the processes, which then finish their calls and exit. Waits for nothing; `close` does."""


class ProcessCaller(AsyncCaller):
    """An `AsyncCaller` whose calls run in supervised processes.

    Args:
        start_method: `spawn`, `forkserver` or `fork`
        start_timeout: seconds for a process to start
        write_timeout: seconds for one request
        close_timeout: seconds for a process to exit
        nice: CPU priority of the processes, 0 to 19; 19 is the lowest
        io_priority: I/O priority of the processes
        import_main: whether processes import the main script; requests with functions defined there need it

    Raises:
        StartMethodError: `start_method` cannot be used
    """

    def __init__(
        self,
        start_method: str = "spawn",
        *,
        start_timeout: float = 30.0,
        write_timeout: float = 1800.0,
        close_timeout: float = 60.0,
        nice: int = 0,
        io_priority: IoPriority = IoPriority.normal,
        import_main: bool = True,
    ) -> None:
        check_start_method(start_method)
        self._start_method = start_method
        self._write_timeout = write_timeout
        self._calls: deque[ScheduledCall] = deque()
        self._longest_call = start_timeout + write_timeout + STOP_SECONDS
        NICE.check("nice", nice)
        is_lower = nice > 0 or io_priority is not IoPriority.normal
        self._make_client = partial(
            WorkerClient,
            start_method=start_method,
            start_timeout=start_timeout,
            close_timeout=close_timeout,
            import_main=import_main,
            on_start=partial(OUTSIDE.lower_priority, nice=nice, io_priority=io_priority) if is_lower else None,
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
        session = None if no_dist else call.session
        try:
            if not (call.is_done(blocking) if session is None else session.look(call, blocking)):
                return False
        except CheckpointError:
            self._calls.popleft()
            if session is not None:
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

    def __del__(self) -> None:
        """Let go of the processes: each exits when its `WorkerClient` is collected, which lives until all is done.

        So it has no effect in a forked child or at interpreter exit either.
        """

    @abstractmethod
    def _begin(self, what: str, call: Call) -> tuple[Future[Any], WorkerClient]:
        """Give a call to a process.

        Raises:
            CheckpointStageError: a value cannot be pickled; the message names it and what to do
            CheckpointSaveError: the system could not start a process
        """

    @abstractmethod
    def _give_up(self, call: ScheduledCall) -> None:
        """Handle a call that failed on another rank and may still run here."""

    @abstractmethod
    def _take_workers(self) -> list[WorkerClient]:
        """Return the workers to close; they get no more calls."""


class TemporalAsyncCaller(ProcessCaller):
    """Starts a process for each request; several may run at the same time.

    With several ranks, a request that failed on another rank is killed here, so that no process writes to a save that
    has ended. The other arguments are those of `ProcessCaller`.

    Args:
        start_method: `spawn` and `forkserver` import the modules of `async_fn` again, which takes seconds if they
            import torch. `fork` starts in milliseconds and pickles nothing, but the next update of the weights copies
            memory page by page and is slow, shared memory stays shared, and it is refused if CUDA is in use.

    Raises:
        StartMethodError: `start_method` cannot be used
    """

    def _begin(self, what: str, call: Call) -> tuple[Future[Any], WorkerClient]:
        if self._start_method == "fork":
            # The process inherits the call, without pickling.
            loop: Callable[..., None] = partial(serve, make_handler=lambda: lambda _request: run_call(call))
            payload = pickle.dumps(None)
        else:
            loop, payload = partial(serve_calls, log_level=_log_level()), _payload_of(what, call)
        worker = self._make_client(loop, name="temporal checkpoint process")
        worker.start()  # in this thread, so that a forked process has the current state
        result = worker.submit(payload, timeout=self._write_timeout, what=what)
        worker.finish()  # the process ends with this request
        return result, worker

    def _give_up(self, call: ScheduledCall) -> None:
        if call.worker is not None:
            call.worker.abort()

    def _take_workers(self) -> list[WorkerClient]:
        return [call.worker for call in self._calls if call.worker is not None]


class PersistentAsyncCaller(ProcessCaller):
    """Sends requests to one process, which starts with the first request.

    Requests run one after the other. A failed request does not affect others; if it kills the process, the next one
    gets a new process. With several ranks, a request that failed on another rank is skipped here, or finishes if it has
    begun, so that two requests never write at the same time. The other arguments are those of `ProcessCaller`.

    Args:
        start_method: `spawn` or `forkserver`; `fork` is refused where CUDA is in use
        write_timeout: seconds for one request, once it is sent to the process

    Raises:
        StartMethodError: `start_method` cannot be used
    """

    _worker: WorkerClient | None = None

    @property
    def pid(self) -> int | None:
        """The process ID, or None if no process runs."""
        return None if self._worker is None else self._worker.pid

    def __del__(self) -> None:
        """Let go of the process; see `AsyncCaller`. A later request starts another one."""
        self._worker = None

    def warm_up(self) -> None:
        """Start the process now, so that the first request does not wait for it. Returns immediately.

        Raises:
            CheckpointSaveError: the system refused another process
        """
        self._open_worker().start()

    def take_over(self, other: PersistentAsyncCaller) -> None:
        """Use the worker process of another caller, which then has none. Does nothing if this one has a process."""
        if self._worker is None:
            self._worker, other._worker = other._worker, None

    @staticmethod
    def async_loop(rank: int, sock: Socket, log_level: int = logging.INFO) -> None:
        """The loop of the process: it receives requests from the trainer and answers each with its number.

        Args:
            rank: rank of the trainer
            sock: connection to the trainer for requests, results and errors; the reference has three queues
            log_level: level of this package's loggers in the process
        """
        logger.debug("persistent checkpoint process of rank %d", rank)
        serve_calls(sock, log_level)

    def _begin(self, what: str, call: Call) -> tuple[Future[Any], WorkerClient]:
        payload = _payload_of(what, call)
        worker = self._open_worker()
        return worker.submit(payload, timeout=self._write_timeout, what=what), worker

    def _give_up(self, call: ScheduledCall) -> None:
        call.result.cancel()  # has no effect on a running call

    def _take_workers(self) -> list[WorkerClient]:
        worker, self._worker = self._worker, None
        return [] if worker is None else [worker]

    def _open_worker(self) -> WorkerClient:
        if self._worker is None:
            loop = partial(PersistentAsyncCaller.async_loop, this_rank(), log_level=_log_level())
            self._worker = self._make_client(loop, name="persistent checkpoint process")
        return self._worker


def _log_level() -> int:
    """The level of this package's loggers, for the processes."""
    return logging.getLogger("ckpt_component").getEffectiveLevel()


def _payload_of(what: str, call: Call) -> bytes:
    """Pickle a call by value. Raises CheckpointStageError, which names the value that cannot be pickled."""
    return pickle_by_value(
        call,
        what,
        parts=dict(zip(("async_fn", "async_fn_args", "async_fn_kwargs"), call, strict=True)),
        fix="Use functions from the top level of a module; TemporalAsyncCaller(start_method='fork') pickles nothing.",
    )
