"""`Job`: a process that answers requests, one at a time, with the rules for such a process in one place. No torch.

- *Start.* The process starts with the first request, or before, by `start`. One that says when it is ready has a
  deadline for that. One that has died is replaced for the next request. Or each request has its own process, which
  is started with it, and ends when it has answered.
- *Deadline.* Each request has one. A process that did not answer by then is ended, as nobody knows what it still does.
- *Errors.* What failed in the process, as an answer of the kind `failed` says, is raised here, with its traceback as
  the cause, and the process continues. How a process ended that answers no more, WorkerDiedError says in words.
- *The end.* `give_up` does not wait: the request that runs fails, and so do later ones. `end` and `kill` are bounded.
  All three may be called twice, and from any thread; the others from one thread at a time.

The process is a `Child`, or has its methods, as `compat.worker_process` has, where a user's functions are called. Who
shall not wait for an answer asks on a `Lane`.

The writer process is not a job (`core/writing/process.py`). A save is several frames, which depend on what this
very process was sent before, so it must not be replaced between them. A server has several connections: a
late answer ends one of them, or the process. What a late write has open is looked up before the process is ended.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

from ..errors import CheckpointSaveError, CheckpointTimeoutError, RemoteTraceback, WorkerDiedError
from .outside import OUTSIDE, Outside
from .processes.framing import Blobs, Frame
from .processes.serve import as_local_error
from .processes.start import describe_exit

logger = logging.getLogger(__name__)

#: For a process that closed its connection to exit.
_EXIT_SECONDS = 0.5


class ConnectedProcess(Protocol):
    """What a job needs of a process; see `Child`."""

    @property
    def pid(self) -> int:
        """Its process ID."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        ...

    def send(
        self, header: Mapping[str, Any], deadline: float = math.inf, blobs: Blobs = (), fds: Sequence[int] = ()
    ) -> None:
        """Send one frame."""

    def receive(self, deadline: float = math.inf) -> Frame | None:
        """Wait for the next frame; None if it has hung up or died."""
        ...

    def hang_up(self, *, listens: bool = True) -> None:
        """Tell it that nothing more will come."""

    def wait(self, timeout: float) -> int | None:
        """Wait for its end, and return the exit code."""
        ...

    def end(self, timeout: float) -> int | None:
        """Hang up, and kill it if it does not end in time."""
        ...

    def kill(self) -> int | None:
        """End it now."""
        ...


_Process = TypeVar("_Process", bound=ConnectedProcess)


def _nothing_more(process: ConnectedProcess, code: int | None, is_ready: bool) -> tuple[str, str | None]:
    return "", None


class Job(Generic[_Process]):
    """See the top of this file.

    Args:
        name: of the process, in errors: `checkpoint process`
        launch: starts the process; called with the request, if each has its own process
        outside: what the job runs in
        once: whether each request has its own process; it is the job of the process, so it has no bytes
        ready_seconds: within which the process says that it is ready, by a frame; None: it does not say so
        leave_seconds: for a process to leave that was given up, or did not answer in time, until it is killed
        explain: called with a process that ended, or was not ready in time, its exit code, and whether it was ready;
            returns what is to be added to the text of the error, and the traceback that the process left

    Attributes:
        process: the process that runs, or did last; None before the first
    """

    def __init__(
        self,
        name: str,
        launch: Callable[..., _Process],
        outside: Outside = OUTSIDE,
        *,
        once: bool = False,
        ready_seconds: float | None = None,
        leave_seconds: float = 0.0,
        explain: Callable[[_Process, int | None, bool], tuple[str, str | None]] = _nothing_more,
    ) -> None:
        self._name, self._launch, self._outside = name, launch, outside
        self._once, self._ready_seconds, self._leave_seconds = once, ready_seconds, leave_seconds
        self._explain = explain
        self._lock = outside.lock()
        self.process: _Process | None = None
        self._running: _Process | None = None
        self._is_ready, self._ready_by = False, math.inf
        self._given_up = ""

    @property
    def pid(self) -> int | None:
        """The ID of the process; None: none was started, or it was ended."""
        process = self._running
        return None if process is None else process.pid

    @property
    def is_ready(self) -> bool:
        """Whether the process runs and would take a request."""
        process = self._running
        return process is not None and self._is_ready and process.alive

    def start(self) -> None:
        """Start the process, if there is none. Does not wait until it is ready. Raises what `launch` does."""
        with self._lock:
            self._start()

    def ask(
        self, header: Mapping[str, Any], seconds: float, what: str, blobs: Blobs = (), fds: Sequence[int] = ()
    ) -> Frame:
        """Send a request, and wait for its answer; starts a process if none runs.

        Args:
            header: plain values
            seconds: for the request, once the process is ready
            what: its name in errors: `request 3`
            blobs: bytes that follow the header
            fds: open file descriptors, of which copies are sent

        Raises:
            CheckpointSaveError: it failed there, or the job was given up
            WorkerDiedError: the process ended
            CheckpointTimeoutError: it was not ready or did not answer in time; it was ended
        """
        process = self._take_process(what, *([header] if self._once else []))
        self._await_ready(process, what)
        deadline, named = self._outside.now() + seconds, self._named(process)
        try:
            return self._answer(
                process,
                what,
                None if self._once else partial(process.send, header, deadline, blobs, fds),
                deadline,
                late=f"The {named} did not finish {what} within {seconds:g} s; it hangs, or the timeout is too short.",
                failed=f"{what[:1].upper()}{what[1:]} failed in the {named}",
            )
        finally:
            if self._once:
                self.end(self._leave_seconds)

    def give_up(self, reason: str) -> None:
        """Let the request that runs fail now, and later ones too; does not wait. The process hears of it, and ends.

        Args:
            reason: follows the name of a request in errors: `was given up`
        """
        with self._lock:
            self._given_up, process = reason, self._running
        if process is not None:
            process.hang_up(listens=False)

    def end(self, seconds: float) -> int | None:
        """Ask the process to exit, and kill it after so many seconds, or at once if it was not ready yet.

        Returns:
            Its exit code, negative for a signal; None: there is no process, or the kernel does not let it end.
        """
        process = self._let_go()
        return None if process is None else process.end(max(seconds, 0.0) if self._is_ready else 0.0)

    def kill(self) -> int | None:
        """Kill the process. Returns as `end`."""
        process = self._let_go()
        return None if process is None else process.kill()

    def _start(self, *request: Mapping[str, Any]) -> _Process:
        if self._running is None:
            now, ready = self._outside.now(), self._ready_seconds
            self._is_ready, self._ready_by = (True, now) if ready is None else (False, now + ready)
            self._running = self.process = self._launch(*request)
        return self._running

    def _take_process(self, what: str, *request: Mapping[str, Any]) -> _Process:
        with self._lock:
            self._check(what)
            if self._running is not None and not self._running.alive:
                logger.warning("%s Another one is started.", self._died(self._running, ""))
                self._running.kill()
                self._running = None
            return self._start(*request)

    def _let_go(self) -> _Process | None:
        with self._lock:
            process, self._running = self._running, None
        return process

    def _check(self, what: str) -> None:
        if self._given_up:
            raise CheckpointSaveError(f"{what} {self._given_up}.")

    def _await_ready(self, process: _Process, what: str) -> None:
        if not self._is_ready:
            named, hint = self._named(process), self._explain(process, None, False)[0]
            late = f"Timed out after {self._ready_seconds:g}s: the {named} was not ready.{hint}"
            try:
                self._answer(process, what, None, self._ready_by, late=late, failed=f"The {named} could not start")
            except CheckpointSaveError:
                self.kill()
                raise
            self._is_ready = True

    def _answer(
        self,
        process: _Process,
        what: str,
        send: Callable[[], None] | None,
        deadline: float,
        *,
        late: str,
        failed: str,
    ) -> Frame:
        """The answer to what is sent, or the next one. The texts are those of errors."""
        frame, error = None, cast(Exception | None, None)
        try:
            if send is not None:
                send()
            frame = process.receive(deadline)
        except TimeoutError as timeout:
            error = CheckpointTimeoutError(late)
            error.__cause__ = timeout
        except OSError:
            pass  # it has closed the connection
        if frame is None:
            if not self._given_up:
                error = error or self._died(process, f" while it ran {what}")
            self.end(self._leave_seconds)
            self._check(what)
            assert error is not None
            raise error
        if frame[0].get("kind") == "failed":
            raise as_local_error(cast(Any, frame[0]), failed)
        return frame

    def _died(self, process: _Process, doing: str) -> WorkerDiedError:
        """The error that says how a process ended; `doing` is what it did, as the end of a sentence."""
        code = process.wait(_EXIT_SECONDS)
        if code is None:
            return WorkerDiedError(f"The {self._named(process)} closed its connection{doing}, but still runs.")
        more, traceback = self._explain(process, code, self._is_ready)
        doing = doing if self._is_ready else " before it was ready"
        error = WorkerDiedError(f"The {self._named(process)} {describe_exit(code, process.pid)}{doing}.{more}")
        if traceback is not None:
            error.__cause__ = RemoteTraceback(traceback)
        return error

    def _named(self, process: _Process) -> str:
        return f"{self._name} (pid {process.pid})"
