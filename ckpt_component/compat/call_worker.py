"""A supervised process behind a queue of requests: first come, first served, and a dead process is replaced."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .call_process import CallProcess
from .call_pump import CallPump


class CallWorker:
    """Runs requests in a process of its own, one after the other.

    Closing is bounded, and happens by itself when the interpreter exits. A worker that is collected without `close()`
    finishes what it was asked to do, and ends; nobody waits for that.

    Args:
        make_process: starts the process; called again when it has died and there is more to do.
        start_timeout: seconds that `make_process` allows for the start, for the bounds of waits.
        close_timeout: seconds for the process to leave when it is asked to.
        exit_timeout: seconds for everything when the interpreter exits; None lets requests have their own time.
        farewell: a pickled request that the process gets last.
    """

    def __init__(
        self,
        make_process: Callable[[], CallProcess],
        *,
        start_timeout: float = 30.0,
        close_timeout: float = 60.0,
        exit_timeout: float | None = None,
        farewell: bytes = b"",
    ) -> None:
        self._pump = CallPump(make_process, start_timeout, close_timeout, exit_timeout, farewell)
        self._collected = weakref.finalize(self, self._pump.abandon)
        self._collected.atexit = False  # the exit handler of the pump waits for the work; this one would not

    @property
    def process(self) -> CallProcess | None:
        """The process that runs now, or None."""
        return self._pump.process

    @property
    def patience(self) -> float:
        """Seconds after which everything asked for so far must be answered, one way or the other."""
        return self._pump.patience()

    def start(self) -> None:
        """Start the process now, from this thread; requests do so otherwise. Raises what `make_process` raises."""
        self._pump.start()

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
            CheckpointSaveError: the worker is closed, or belongs to another process.
        """
        return self._pump.submit(payload, timeout, what, finish)

    def finish(self) -> None:
        """Take no more requests; end when those taken are done. Does not wait."""
        self._pump.finish()

    def close(self, timeout: float | None = None) -> None:
        """Take no more requests, let those taken be done, and end the process.

        Args:
            timeout: seconds for everything, after which the process is stopped and what is left has failed. None:
                every request may take the time it was given.
        """
        self._collected.detach()
        self._pump.close(timeout)

    def abort(self) -> None:
        """Kill the process now; what is not done has failed."""
        self._collected.detach()
        self._pump.abort()
