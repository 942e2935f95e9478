"""A supervised process with a queue of requests, handled in order. A process that died is replaced.

A thread communicates with the process, so that a large request does not block the thread that submits it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from ..core.processes.owner_process import OwnerProcess
from ..errors import CheckpointError, CheckpointSaveError, CheckpointTimeoutError, WorkerDiedError
from .spawn import ProcessContext
from .worker_process import CallProcess

logger = logging.getLogger(__name__)

#: While waiting for a payload, the thread checks this often whether to stop.
_POLL_SECONDS = 0.5
#: Time for the thread to stop a process that does not react.
STOP_SECONDS = 10.0
#: Priority among the exit handlers of multiprocessing: after those of the queues that use workers.
_EXIT_PRIORITY = 10


class WorkerClient:
    """Runs requests in its own process, one after the other.

    A client that is not closed finishes its requests; its process ends when the client is collected or the
    interpreter exits. Failures are also logged, because callers may not ask for the result.

    Args:
        loop: the function that the process runs; see `CallProcess`. It is restarted if it died and there are
            further requests.
        args: its further arguments
        close_timeout: seconds for the process to exit when it is asked to
        farewell: a pickled request that is sent last
        on_start: called with the pid of each process that is started
        options: of each `CallProcess`

    Attributes:
        process: the running process, or None
        context: context of the last process that was started, or None
    """

    def __init__(
        self,
        loop: Callable[..., None],
        args: tuple[Any, ...] = (),
        *,
        close_timeout: float = 60.0,
        farewell: bytes = b"",
        on_start: Callable[[int], None] | None = None,
        **options: Any,
    ) -> None:
        self._new_process = partial(CallProcess, loop, args, **options)
        self._on_start = on_start
        self._close_timeout = close_timeout
        self._farewell = farewell
        self._owner = OwnerProcess("worker")
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ckpt-worker-client")
        self._thread: int | None = None
        self._requests: set[Future[Any]] = set()
        self._closed = self._ends_after_requests = False
        self._stopped = ""  # why everything was stopped
        self.process: CallProcess | None = None
        self.context: ProcessContext | None = None
        # Also runs at the exit of multiprocessing's children, which do not run atexit handlers.
        Finalize(self, _close_at_exit, (weakref.ref(self),), exitpriority=_EXIT_PRIORITY)

    def start(self) -> None:
        """Start the process now, from this thread, instead of at the first request. Raises as `CallProcess`."""
        with self._lock:
            self._check_open()
            self._ensure_process()

    def submit(
        self,
        payload: bytes | Future[bytes],
        *,
        timeout: float,
        what: str,
        result_of: Callable[[Any], Any] = lambda answer: answer,
    ) -> Future[Any]:
        """Queue a request.

        Args:
            payload: the pickled request, or a future of it; later requests wait for it
            timeout: seconds for the request once it is sent to the process
            what: name of the request in error messages
            result_of: converts the answer to the result

        Returns:
            A future of the result. It fails with CheckpointSaveError if the request raised, WorkerDiedError if the
            process died, CheckpointTimeoutError if it did not answer in time, or the error of starting a process.

        Raises:
            CheckpointSaveError: the client is closed, or belongs to another process
        """
        with self._lock:
            self._check_open()
            result = self._executor.submit(self._run, payload, timeout, what, result_of)
            self._requests.add(result)
        result.add_done_callback(self._after)
        return result

    def finish(self) -> None:
        """Accept no more requests; the process ends after the accepted ones. Does not wait."""
        with self._lock:
            self._closed = self._ends_after_requests = True
        self._after(None)

    def close(self, timeout: float | None = None) -> None:
        """Accept no more requests, finish the accepted ones, and end the process. Safe to call twice.

        Args:
            timeout: seconds for everything; then the process is stopped and remaining requests fail. None: every
                request may use its own timeout.
        """
        self._close(timeout, "was still running when the time for close() was over")

    def abort(self) -> None:
        """Stop the process now; unfinished requests fail."""
        self._close(0, "was given up by abort")

    def _close(self, timeout: float | None, reason: str) -> None:
        if not self._owner.is_here:
            return  # a forked copy does not own the process
        if threading.get_ident() == self._thread:
            return self.finish()  # called by a request, which must not wait for later ones
        begin = time.monotonic()
        with self._lock:
            self._closed = True
            requests = list(self._requests)
        if wait(requests, timeout).not_done:
            with self._lock:
                self._stopped = reason
                process = self.process
            if process is not None:
                process.hang_up(listens=False)
            if wait(requests, STOP_SECONDS).not_done:
                logger.error("the thread of the worker process did not end")
                return
        self._executor.shutdown()
        self._end_process(self._close_timeout if timeout is None else timeout - (time.monotonic() - begin))

    def _check_open(self) -> None:
        if not self._owner.is_here:
            raise CheckpointSaveError("This worker belongs to the process that made it, not to a forked copy of it.")
        if self._closed:
            raise CheckpointSaveError("This worker is closed; make a new one.")

    def _check_not_stopped(self, what: str) -> None:
        if self._stopped:
            raise CheckpointSaveError(f"{what} {self._stopped}.")

    def _ensure_process(self) -> CallProcess:
        if self.process is None:
            self.process = self._new_process()
            self.context = self.process.context
            if self._on_start is not None:
                self._on_start(self.process.pid)
        return self.process

    def _end_process(self, timeout: float | None) -> None:
        """End the process, if any, within `timeout` seconds, or at once."""
        with self._lock:
            process, self.process = self.process, None
        if process is None:
            return
        if timeout is None or self._stopped:
            process.stop()
        else:
            process.end(max(timeout, 0.1), self._farewell)

    # Methods of the thread.

    def _run(self, payload: bytes | Future[bytes], timeout: float, what: str, result_of: Callable[[Any], Any]) -> Any:
        self._thread = threading.get_ident()
        try:
            while isinstance(payload, Future):
                self._check_not_stopped(what)
                if wait([payload], _POLL_SECONDS).done:
                    payload = payload.result(0)
            return result_of(self._call(payload, timeout, what))
        except BaseException as error:
            # Also raised, if anybody asks for the result. A traceback would keep this client alive.
            logger.warning("%s", str(error))
            raise

    def _call(self, payload: bytes, timeout: float, what: str) -> Any:
        with self._lock:
            self._check_not_stopped(what)
            if self.process is not None and not self.process.alive:
                logger.warning("%s Another one is started.", self.process.death())
                self.process.stop()
                self.process = None
            process = self._ensure_process()
        try:
            process.await_ready()
            return process.call(payload, timeout, what)
        except CheckpointError as error:
            # A process that answers with an error keeps running.
            if not process.ready or isinstance(error, (WorkerDiedError, CheckpointTimeoutError)):
                self._end_process(None)
            self._check_not_stopped(what)
            raise

    def _after(self, request: Future[Any] | None) -> None:
        """Finish a request, or note that there will be no more. After the last one, the process ends."""
        with self._lock:
            if request is not None:
                self._requests.discard(request)
            ends = self._ends_after_requests and not self._requests
        if ends:
            self._end_process(self._close_timeout)


def _close_at_exit(client: weakref.ref[WorkerClient]) -> None:
    alive = client()
    if alive is not None:
        alive.close()
