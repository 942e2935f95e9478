"""A supervised process, from its parent's side: start, call, detect its death, end."""

from __future__ import annotations

import contextlib
import logging
import pickle
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, cast

from ..core.processes.exit_text import describe_exit
from ..core.processes.framing import Channel
from ..core.processes.remote_error import as_local_error
from ..core.processes.serve import SIGNALS_OF_THE_TRAINER
from ..errors import CheckpointError, CheckpointSaveError, CheckpointTimeoutError, RemoteTraceback, WorkerDiedError
from .pickling import pickle_by_value
from .spawn import ProcessContext, StartMethodError, check_start_method_exists, end_processes, start_processes
from .worker_main import enter

logger = logging.getLogger(__name__)

#: Time for a process that closed its connection to exit.
_EXIT_SECONDS = 0.5
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
    """A process that runs a loop of `worker_main`; and the connection to it.

    Used by one thread at a time, except for `hang_up`.

    Args:
        loop: called in the process as `loop(socket, *args)`
        args: further arguments; pickled by value now, or inherited by a forked process
        start_method: `spawn`, `forkserver` or `fork`
        start_timeout: seconds for the process to become ready
        name: name of the process in error messages
        import_main: whether a spawned process imports the main script; functions defined there need it

    Attributes:
        context: the started process, as `start_processes` returns it
        ready: whether the process has reported that it is ready

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
        start_timeout: float = 30.0,
        name: str = "worker process",
        import_main: bool = True,
    ) -> None:
        check_start_method(start_method)
        self.name = name
        self._start_method = start_method
        self._start_timeout = start_timeout
        self._start_deadline = time.monotonic() + start_timeout
        self.ready = False
        is_fork = start_method == "fork"
        work: Any = (loop, args)
        if not is_fork:
            parts = {"its loop": loop, "args": args}
            work = pickle_by_value(work, f"What the {name} is to run", parts=parts, fix=FIX_FOR_SPAWN)
        ours, theirs = socket.socketpair()
        # The process also exits when this object is collected.
        weakref.finalize(self, ours.close)
        try:
            kept_out = contextlib.nullcontext() if import_main else _main_kept_out()
            # Closed here, so that the process has the only copy.
            with theirs, _group_signals_held(start_method), kept_out:
                given = (theirs, ours if is_fork else None, work)
                context = start_processes(enter, given, join=False, start_method=start_method)
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise CheckpointSaveError(f"The {name} could not be started: {error}.", error.errno) from error
            raise
        self.context = cast(ProcessContext, context)  # the result with join=False
        self._process = self.context.processes[0]
        super().__init__(ours, self._process.is_alive)

    @property
    def pid(self) -> int:
        """The process ID."""
        return self.context.pids()[0]

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.is_alive()

    def await_ready(self) -> None:
        """Wait until the process is ready.

        Raises:
            CheckpointTimeoutError: it was not ready within the start timeout
            CheckpointSaveError: its start raised an error
            WorkerDiedError: it ended before it was ready
        """
        if self.ready:
            return
        late = (
            f"Timed out after {self._start_timeout:g}s: the {self.name} (pid {self.pid}) was not ready. "
            "Its start imports the main script again; the start-up timeout must allow for that."
        )
        self._answer(None, self._start_deadline, late, f"The {self.name} (pid {self.pid}) could not start")
        self.ready = True

    def call(self, payload: bytes, timeout: float, what: str) -> Any:
        """Send one request and wait for its answer.

        Args:
            payload: the pickled request
            timeout: seconds for sending and answering
            what: name of the request in error messages, such as `request 3`

        Raises:
            CheckpointSaveError: the request raised an error; the process keeps running
            WorkerDiedError: the process ended
            CheckpointTimeoutError: no answer in time; stop the process
        """
        deadline = time.monotonic() + timeout
        late = (
            f"The {self.name} (pid {self.pid}) did not finish {what} within {timeout:g} s; "
            "it hangs, or the timeout is too short."
        )
        failed = f"{what[:1].upper()}{what[1:]} failed in the {self.name} (pid {self.pid})"
        return self._answer(payload, deadline, late, failed, f" while it ran {what}")

    def end(self, timeout: float, farewell: bytes = b"") -> None:
        """Ask the process to exit, and stop it after `timeout` seconds.

        Args:
            timeout: seconds for the process to exit
            farewell: a last pickled request, or nothing
        """
        deadline = time.monotonic() + timeout
        try:
            if self.ready:  # a process that is still starting has no work to lose
                if farewell:
                    self.call(farewell, timeout, "its last request")
                self.hang_up(listens=False)
                self._process.join(max(deadline - time.monotonic(), 0))
                if self.alive:
                    logger.warning("the %s (pid %d) did not end within %g s; stopping it", self.name, self.pid, timeout)
        except CheckpointError as error:
            logger.warning("%s", error)
        self.stop()

    def stop(self) -> None:
        """End the process by SIGTERM, and half a second later by SIGKILL. Does nothing if it has ended."""
        self.hang_up(listens=False)  # by which the process knows that the SIGTERM is meant for it
        end_processes(self.context.processes, _TERMINATE_SECONDS)
        self.close()
        self.context.discard_error_files()

    def death(self, doing: str = "") -> WorkerDiedError:
        """The error that describes how the process ended.

        Args:
            doing: what it was doing, as the end of a sentence
        """
        self._process.join(_EXIT_SECONDS)
        code = self._process.exitcode
        if code is None:
            return WorkerDiedError(f"The {self.name} (pid {self.pid}) closed its connection{doing}, but still runs.")
        doing, hint = (doing, "") if self.ready else (" before it was ready", self._start_hint(code))
        error = WorkerDiedError(f"The {self.name} (pid {self.pid}) {describe_exit(code, self.pid)}{doing}.{hint}")
        text = self.context.error_text(0)
        if text is not None:
            error.__cause__ = RemoteTraceback(text)
        return error

    def _answer(self, payload: bytes | None, deadline: float, late: str, failed: str, doing: str = "") -> Any:
        """The answer to a request, if any, or the next. The arguments after the deadline are for error messages."""
        try:
            if payload is not None:
                self.send({}, deadline, [payload])
            frame = self.receive(deadline)
        except TimeoutError as error:
            raise CheckpointTimeoutError(late) from error
        except OSError:
            frame = None
        if frame is None:
            raise self.death(doing)
        header, blob, _ = frame
        if "error" in header:
            raise as_local_error(cast(Any, header), failed)
        return pickle.loads(blob) if blob else None

    def _start_hint(self, code: int) -> str:
        if code < 0 or self._start_method == "fork":
            return ""
        if _main_script_is_unguarded():
            return (
                " A started process imports the main script again, and yours does its work while it is imported: "
                'put that under `if __name__ == "__main__":`.'
            )
        return " What it printed on stderr says why."


@contextlib.contextmanager
def _group_signals_held(start_method: str) -> Iterator[None]:
    """Block signals that are meant for the trainer in a process started here until its handlers are installed."""
    # A fork server and a resource tracker inherit the blocked signals; start them before.
    if start_method != "fork":
        resource_tracker.ensure_running()
    if start_method == "forkserver":
        forkserver.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_OF_THE_TRAINER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _main_kept_out() -> Iterator[None]:
    """Processes started in this block do not import the main script, as after `python -m package`."""
    main = sys.modules["__main__"]
    # multiprocessing skips this name
    spec, main.__spec__ = main.__spec__, ModuleSpec("ckpt_component.__main__", None)
    try:
        yield
    finally:
        main.__spec__ = spec


def _main_script_is_unguarded() -> bool:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return path is not None and "__main__" not in Path(path).read_text(errors="replace")
    except OSError:
        return False
