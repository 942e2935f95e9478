"""A process with a queue of requests, handled in order: a `Job`, and the `Lane` that asks it.

The lane communicates with the process, so that a large request does not block the thread that submits it.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

from ..core.lane import Lane
from ..core.outside import OUTSIDE, Future, Outside
from ..core.processes.running import OwnerProcess
from ..errors import CheckpointError, CheckpointSaveError
from .spawn import ProcessContext, at_the_end_of
from .worker_process import call, worker_job

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
        outside: what it runs in
        **options: of `worker_job`
    """

    def __init__(
        self,
        loop: Callable[..., None],
        args: tuple[Any, ...] = (),
        *,
        close_timeout: float = 60.0,
        farewell: bytes = b"",
        outside: Outside = OUTSIDE,
        **options: Any,
    ) -> None:
        self._outside, self._close_timeout, self._farewell = outside, close_timeout, farewell
        self._owner = OwnerProcess("worker", outside)
        self._job = worker_job(loop, args, outside=outside, **options)
        # Before other handlers of the exit, which close what requests need.
        self._lane = Lane("ckpt-worker-client", outside, at_exit=math.inf, jobs="requests of a worker process")
        self._stopped = ""  # why everything was stopped
        at_the_end_of(self, _EXIT_PRIORITY, _close_at_exit, weakref.ref(self))

    @property
    def pid(self) -> int | None:
        """The ID of the process; None: there is none."""
        return self._job.pid

    @property
    def context(self) -> ProcessContext | None:
        """The context of the last process that was started, or None."""
        process = self._job.process
        return None if process is None else process.context

    def start(self) -> None:
        """Start the process now, from this thread, instead of at the first request. Raises as `CallProcess`."""
        self._check_open()
        self._job.start()

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
        self._check_open()
        return self._lane.submit(self._run, payload, timeout, what, result_of)

    def finish(self) -> None:
        """Accept no more requests; the process ends after the accepted ones. Does not wait."""
        if not self._owner.closed:
            self._owner.closed = True
            self._lane.post(self._end_process, self._close_timeout)

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
        if self._lane.is_here:
            return self.finish()  # called by a request, which must not wait for later ones
        deadline = math.inf if timeout is None else self._outside.now() + timeout
        self._owner.closed = True
        if not self._lane.drain(deadline):
            self._stopped = reason
            self._job.give_up(reason)
            if not self._lane.drain(self._outside.now() + STOP_SECONDS):
                logger.error("the thread of the worker process did not end")
                return self._lane.stop()
        self._end_process(self._close_timeout if timeout is None else deadline - self._outside.now())

    def _check_open(self) -> None:
        if not self._owner.is_here:
            raise CheckpointSaveError("This worker belongs to the process that made it, not to a forked copy of it.")
        if self._owner.closed:
            raise CheckpointSaveError("This worker is closed; make a new one.")

    def _end_process(self, timeout: float) -> None:
        """When all requests are done: end the process, if any, within `timeout` seconds, or at once."""
        self._lane.stop()
        deadline = self._outside.now() + max(timeout, 0.1)
        if self._farewell and self._job.is_ready and not self._stopped:
            try:
                call(self._job, self._farewell, deadline - self._outside.now(), "its last request")
            except CheckpointError as error:
                logger.warning("%s", error)
        self._job.end(0.0 if self._stopped else deadline - self._outside.now())

    # On the lane.

    def _run(self, payload: bytes | Future[bytes], timeout: float, what: str, result_of: Callable[[Any], Any]) -> Any:
        try:
            while isinstance(payload, Future):
                if self._stopped:
                    raise CheckpointSaveError(f"{what} {self._stopped}.")
                if self._outside.wait_for([payload], _POLL_SECONDS):
                    payload = payload.result(0)
            return result_of(call(self._job, payload, timeout, what))
        except BaseException as error:
            # Also raised, if anybody asks for the result. A traceback would keep this client alive.
            logger.warning("%s", str(error))
            raise


def _close_at_exit(client: weakref.ref[WorkerClient]) -> None:
    alive = client()
    if alive is not None:
        alive.close()
