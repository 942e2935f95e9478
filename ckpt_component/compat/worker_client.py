"""A process with a queue of requests, handled in order: a `Job`, and the `Lane` that asks it.

The lane communicates with the process, so that a large request does not block the thread that submits it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from ..core.job import Job
from ..core.lane import Lane
from ..core.outside import OUTSIDE, Future, Outside
from ..core.processes.framing import Channel
from ..core.processes.running import OwnerProcess
from ..errors import CheckpointError, CheckpointSaveError
from .pickling import pickle_by_value
from .spawn import (
    ProcessContext,
    StartMethodError,
    at_the_end_of,
    check_start_method_exists,
    end_processes,
    group_signals_held,
    main_kept_out,
    start_processes,
)
from .worker_main import enter

logger = logging.getLogger(__name__)

#: Between SIGTERM and SIGKILL.
_TERMINATE_SECONDS = 0.5

FIX_FOR_SPAWN = "Use functions and classes from the top level of a module, or a process that is forked."


def check_start_method(start_method: str) -> None:
    """Check that a start method exists, and refuse fork in a process that uses CUDA.

    Raises:
        StartMethodError: the method cannot be used; the message names one that can
    """
    check_start_method_exists(start_method)
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # this module does not import torch
    if start_method == "fork" and cuda is not None and cuda.is_initialized():
        raise StartMethodError(
            "start_method='fork' cannot be used where CUDA is in use: a copied context does not work. Take 'spawn'."
        )


class CallProcess(Channel):
    """A process that runs a loop of `worker_main`; and the connection to it. Has the methods of `Child`.

    Args:
        loop: called in the process as `loop(socket, *args)`
        args: further arguments; pickled by value now, or inherited by a forked process
        start_method: `spawn`, `forkserver` or `fork`
        name: name of the process in error messages
        import_main: whether a spawned process imports the main script; functions defined there need it
        outside: of this process

    Attributes:
        context: the started process, as `start_processes` returns it
        pid: its process ID

    Raises:
        StartMethodError: fork in a process that uses CUDA, or an unknown start method
        CheckpointStageError: `loop` or `args` cannot be pickled
        CheckpointSaveError: the system could not start a process
    """

    def __init__(
        self,
        loop: Callable[..., None],
        args: tuple[Any, ...] = (),
        *,
        start_method: str = "spawn",
        name: str = "worker process",
        import_main: bool = True,
        outside: Outside = OUTSIDE,
    ) -> None:
        check_start_method(start_method)
        self._name, self._start_method = name, start_method
        is_fork = start_method == "fork"
        work: Any = (loop, args)
        if not is_fork:
            parts = {"its loop": loop, "args": args}
            work = pickle_by_value(work, f"What the {name} is to run", parts=parts, fix=FIX_FOR_SPAWN)
        ours, theirs = outside.pair()
        # The process also exits when this object is collected.
        weakref.finalize(self, ours.close)
        try:
            kept_out = contextlib.nullcontext() if import_main else main_kept_out()
            # Closed here, so that the process has the only copy.
            with contextlib.closing(theirs), group_signals_held(start_method), kept_out:
                given = (theirs, ours if is_fork else None, work)
                context = start_processes(enter, given, join=False, start_method=start_method)
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise CheckpointSaveError(f"The {name} could not be started: {error}.", error.errno) from error
            raise
        self.context = cast(ProcessContext, context)  # the result with join=False
        self._process = self.context.processes[0]
        self.pid = self.context.pids()[0]
        super().__init__(ours, self._process.is_alive, outside=outside)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.is_alive()

    def wait(self, timeout: float) -> int | None:
        """Wait at most `timeout` seconds for its end; returns the exit code, negative for a signal, or None."""
        self._process.join(timeout)
        return self._process.exitcode

    def end(self, timeout: float) -> int | None:
        """Hang up, and stop the process if it does not end in `timeout` seconds. Returns as `wait`."""
        self.hang_up(listens=False)
        if self.wait(timeout) is None and timeout > 0:
            logger.warning("the %s (pid %d) did not end within %g s; stopping it", self._name, self.pid, timeout)
        return self.kill()

    def kill(self) -> int | None:
        """End the process by SIGTERM, and half a second later by SIGKILL, if it has not ended. Returns as `wait`."""
        self.hang_up(listens=False)  # by which the process knows that the SIGTERM is meant for it
        end_processes(self.context.processes, _TERMINATE_SECONDS)
        self.close()
        self.context.discard_error_files()
        return self._process.exitcode

    def explain(self, code: int | None, is_ready: bool) -> tuple[str, str | None]:
        """What is to be added to an error of this process; see `Job`."""
        if code is None:
            return " Its start imports the main script again; the start-up timeout must allow for that.", None
        return self._start_hint(code) * (not is_ready), self.context.error_text(0)

    def _start_hint(self, code: int) -> str:
        if code < 0 or self._start_method == "fork":
            return ""
        if _main_script_is_unguarded():
            return (
                " A started process imports the main script again, and yours does its work while it is imported: "
                'put that under `if __name__ == "__main__":`.'
            )
        return " What it printed on stderr says why."


def worker_job(
    loop: Callable[..., None],
    args: tuple[Any, ...] = (),
    *,
    start_timeout: float = 30.0,
    name: str = "worker process",
    on_start: Callable[[int], None] | None = None,
    outside: Outside = OUTSIDE,
    **options: Any,
) -> Job[CallProcess]:
    """A job whose process runs a loop of `worker_main`.

    Args:
        loop: see `CallProcess`; the same for the next one
        args: see above
        start_timeout: seconds for the process to become ready
        name: name of the process in error messages
        on_start: called with the pid of each process that is started
        outside: what the job runs in
        **options: others of a `CallProcess`
    """

    def launch() -> CallProcess:
        process = CallProcess(loop, args, name=name, outside=outside, **options)
        if on_start is not None:
            on_start(process.pid)
        return process

    return Job(name, launch, outside, ready_seconds=start_timeout, explain=CallProcess.explain)


def call(job: Job[CallProcess], payload: bytes, timeout: float, what: str) -> Any:
    """Ask for the answer to a pickled request; see `Job.ask`."""
    blob = job.ask({"kind": "call"}, timeout, what, [payload])[1]
    return pickle.loads(blob) if blob else None


def _main_script_is_unguarded() -> bool:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return path is not None and "__main__" not in Path(path).read_text(errors="replace")
    except OSError:
        return False


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
