"""A supervised process behind a queue of requests: first come, first served, and a dead process is replaced.

A thread holds the conversation with the process, so that a large request never blocks the thread that asked for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from ..errors import CheckpointError, CheckpointSaveError, CheckpointTimeoutError, WorkerDiedError
from .spawn import ProcessContext
from .worker_process import CallProcess, RequestNotDeliveredError

logger = logging.getLogger(__name__)

#: An idle thread looks this often whether its process is dead, or the client is to finish.
_POLL_SECONDS = 0.5
#: Beyond its deadline, what the thread may need to stop a process that does not react.
_STOP_SECONDS = 10.0
#: Among the exit handlers of multiprocessing: after those of the queues that use workers.
_EXIT_PRIORITY = 10


@dataclass
class _Request:
    """One request on its way."""

    number: int
    what: str
    timeout: float
    payload: bytes | Future[bytes]
    finish: Callable[[Any], Any]
    answer: Future[Any]

    @property
    def is_ready(self) -> bool:
        return isinstance(self.payload, bytes) or self.payload.done()


class WorkerClient:
    """Runs requests in a process of its own, one after the other.

    Closing is bounded, and happens by itself when the interpreter exits. When its owner is collected without `close()`,
    it finishes what it was asked to do, and ends; failures are logged.

    Args:
        loop: what the process runs, and `args` its further arguments; see `CallProcess`. It is started again when it
            has died and there is more to do.
        args: as above.
        name: what errors call the process.
        start_method: `spawn`, `forkserver` or `fork`.
        start_timeout: seconds for the process to start.
        close_timeout: seconds for the process to leave when it is asked to.
        exit_timeout: seconds for everything when the interpreter exits; None lets requests have their own time.
        farewell: a pickled request that the process gets last.
        owner: the object whose requests these are. The thread keeps the client itself alive.

    Attributes:
        process: the one that runs now, or None.
        context: of the last one that was started, or None.
    """

    def __init__(
        self,
        loop: Callable[..., None],
        args: tuple[Any, ...] = (),
        *,
        name: str = "worker process",
        start_method: str = "spawn",
        start_timeout: float = 30.0,
        close_timeout: float = 60.0,
        exit_timeout: float | None = None,
        farewell: bytes = b"",
        owner: Any,
    ) -> None:
        options = {"name": name, "start_method": start_method, "start_timeout": start_timeout}
        self._new_process: Callable[[], CallProcess] = partial(CallProcess, loop, args, **options)  # type: ignore[arg-type]
        self._start_timeout = start_timeout
        self._close_timeout = close_timeout
        self._farewell = farewell
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._requests: deque[_Request] = deque()
        self._running: _Request | None = None
        self._count = 0
        self._closing = False
        self._end_by: float | None = None
        self._stopped: str | None = None  # why everything must end now
        self._is_abandoned = False  # failures are logged, because no caller is left to ask for results
        self.process: CallProcess | None = None
        self.context: ProcessContext | None = None
        self._thread = threading.Thread(target=self._run, name="ckpt-worker-client", daemon=True)
        self._abandon = weakref.finalize(owner, self.abandon)
        self._abandon.atexit = False  # the exit handler waits for the work; this would not
        # Runs at the exit of the interpreter, and of a child of multiprocessing, which knows no atexit.
        self._exit_handler = Finalize(None, self._close_at_exit, (exit_timeout,), exitpriority=_EXIT_PRIORITY)

    @property
    def patience(self) -> float:
        """Seconds after which everything asked for so far must be answered, one way or the other."""
        with self._changed:
            waiting = [*self._requests, *([self._running] if self._running else [])]
            return sum(self._start_timeout + request.timeout for request in waiting) + _STOP_SECONDS

    def start(self) -> None:
        """Start the process now, from this thread; requests do so otherwise. Raises as `CallProcess`."""
        with self._changed:
            self._check_open()
            self._ensure_process()
            self._ensure_thread()

    def submit(
        self,
        payload: bytes | Future[bytes],
        *,
        timeout: float,
        what: str,
        finish: Callable[[Any], Any] = lambda answer: answer,
    ) -> Future[Any]:
        """Queue a request.

        Args:
            payload: the pickled request, or where it will be; later requests wait for it.
            timeout: seconds for the request from the moment when the process gets it.
            what: the request, for error texts.
            finish: makes the result, or an exception, of the answer.

        Returns:
            The result, or the error: CheckpointSaveError when the request raised, WorkerDiedError when the process
            died, CheckpointTimeoutError when it did not answer in time, and what the start of a process raised.

        Raises:
            CheckpointSaveError: the client is closed, or belongs to another process.
        """
        answer: Future[Any] = Future()
        with self._changed:
            self._check_open()
            self._requests.append(_Request(self._count, what, timeout, payload, finish, answer))
            self._count += 1
            self._ensure_thread()
            self._changed.notify()
        if isinstance(payload, Future):
            payload.add_done_callback(lambda _: self._wake())
        return answer

    def finish(self) -> None:
        """Take no more requests; end when those taken are done. Does not wait."""
        # No lock: the garbage collector calls this in any thread and state. The thread polls the flag.
        if os.getpid() == self._pid:
            self._closing = True
            if self._thread.ident is None:  # never started: nothing to end
                self._exit_handler.cancel()

    def abandon(self) -> None:
        """As `finish`, and no caller will ask for results: failures are logged."""
        self._is_abandoned = True
        self.finish()

    def close(self, timeout: float | None = None) -> None:
        """Take no more requests, let those taken be done, and end the process. Safe to call twice.

        Args:
            timeout: seconds for everything, after which the process is stopped and what is left has failed. None:
                every request may take the time it was given.
        """
        if os.getpid() != self._pid:
            return  # a forked copy; the process is the original's
        with self._changed:
            self._closing = True
            if timeout is not None:
                self._end_by = time.monotonic() + timeout
            self._changed.notify()
        self._join(self.patience + self._close_timeout if timeout is None else timeout)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._stop("was still running when the time for close() was over", kill=False)

    def abort(self) -> None:
        """Kill the process now; what is not done has failed."""
        if os.getpid() == self._pid:
            self._stop("was given up by abort", kill=True)

    def _stop(self, reason: str, *, kill: bool) -> None:
        with self._changed:
            self._closing = True
            self._stopped = reason
            process = self.process
            self._changed.notify()
        if process is not None:
            if kill:
                process.kill()
            process.hang_up()
        self._join(_STOP_SECONDS)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            logger.error("the thread of the %s did not end", process.name if process else "worker process")

    def _join(self, timeout: float) -> None:
        if self._thread.ident is None:
            self._exit_handler.cancel()
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _close_at_exit(self, timeout: float | None) -> None:
        self._is_abandoned = True
        try:
            self.close(timeout)
        except BaseException:  # Ctrl-C of a user who will not wait
            self._stop("was interrupted when the interpreter exited", kill=True)
            raise

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise CheckpointSaveError("This worker belongs to the process that made it, not to a forked copy of it.")
        if self._closing:
            raise CheckpointSaveError("This worker is closed; make a new one.")

    def _ensure_process(self) -> CallProcess:
        if self.process is None:
            self.process = self._new_process()
            self.context = self.process.context
        return self.process

    def _ensure_thread(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    # From here on: the thread.

    def _run(self) -> None:
        try:
            while (request := self._next()) is not None:
                self._do(request)
                with self._changed:
                    self._running = None
                del request
            if self.process is not None:
                left = self._close_timeout if self._end_by is None else self._end_by - time.monotonic()
                if self._stopped:
                    self._drop_process()
                else:
                    self.process.end(max(left, 0.1), self._farewell)
                    self.process = None
        finally:
            self._exit_handler.cancel()
            self._abandon.detach()
            with self._changed:
                self._closing = True
                requests, self._requests = list(self._requests), deque()
            for request in requests:
                reason = self._stopped or "was never taken on, because the thread of its worker ended"
                self._fail(request, CheckpointSaveError(f"{request.what} {reason}."))

    def _next(self) -> _Request | None:
        """The next request whose payload is there; None when all is done."""
        while True:
            with self._changed:
                if self._stopped or (self._closing and not self._requests):
                    return None
                if self._requests and self._requests[0].is_ready:
                    self._running = self._requests.popleft()
                    return self._running
                self._changed.wait(_POLL_SECONDS)
            self._notice_death()

    def _do(self, request: _Request) -> None:
        if not request.answer.set_running_or_notify_cancel():
            return
        try:
            payload = request.payload if isinstance(request.payload, bytes) else request.payload.result(0)
            request.payload = b""  # it can be as large as the state
            result = request.finish(self._call(request, payload))
        except (WorkerDiedError, CheckpointTimeoutError) as error:
            self._drop_process()
            self._fail(request, error if not self._stopped else self._given_up(request, error))
        except BaseException as error:
            self._fail(request, error)
        else:
            request.answer.set_result(result)

    def _call(self, request: _Request, payload: bytes) -> Any:
        try:
            return self._ready_process().call(request.number, payload, request.timeout, request.what)
        except RequestNotDeliveredError as error:
            if self._stopped:
                raise
            # It died while it was idle, or nearly so, and not by this request: one more try.
            logger.warning("%s Another process gets it.", error)
            self._drop_process()
            return self._ready_process().call(request.number, payload, request.timeout, request.what)

    def _ready_process(self) -> CallProcess:
        self._notice_death()
        with self._changed:
            if self._stopped:
                raise WorkerDiedError("It was never sent.")
            process = self._ensure_process()
        try:
            process.await_ready()
        except CheckpointError:
            self._drop_process()
            raise
        return process

    def _notice_death(self) -> None:
        if self.process is not None and not self.process.alive:
            logger.warning("%s The next request gets a new one.", self.process.death())
            self._drop_process()

    def _drop_process(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.stop()

    def _given_up(self, request: _Request, error: BaseException) -> CheckpointSaveError:
        failure = CheckpointSaveError(f"{request.what} {self._stopped}.")
        failure.__cause__ = error
        return failure

    def _fail(self, request: _Request, error: BaseException) -> None:
        if self._is_abandoned:
            logger.error("%s", error)
        if request.answer.running() or request.answer.set_running_or_notify_cancel():
            request.answer.set_exception(error)
