"""One supervised process, seen from its parent: start it, call it, notice its death, end it."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, cast

from ..errors import CheckpointSaveError, CheckpointTimeoutError, WorkerDiedError
from ..writing.exit_text import describe_exit
from ..writing.remote_error import RemoteTraceback, as_local_error
from .messages import END, READY, TAKEN, receive_message, send_message
from .pickling import pickle_by_value
from .spawn import START_METHODS, ProcessContext, StartMethodError, start_processes
from .worker_main import GROUP_SIGNALS, enter

logger = logging.getLogger(__name__)

#: A dead process is noticed by its pipe or sentinel at once, or by this poll when another process holds those open.
_POLL_SECONDS = 0.25
#: How long a process that closed its pipe may take to end.
_EXIT_SECONDS = 0.5
#: Between SIGTERM and SIGKILL.
_TERMINATE_SECONDS = 0.5
#: After SIGKILL. A process in uninterruptible I/O outlasts it, and is then left to the kernel.
_KILL_SECONDS = 5.0

FIX_FOR_SPAWN = "Use functions and classes from the top level of a module, or a process that is forked."


def check_start_method(start_method: str) -> None:
    """Refuse a start method that does not exist, and fork where it would break CUDA.

    Raises:
        StartMethodError: with the one to take instead.
    """
    if start_method not in START_METHODS:
        raise StartMethodError(f"There is no start method {start_method!r}; take one of {', '.join(START_METHODS)}.")
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # this module does not import torch
    if start_method == "fork" and cuda is not None and cuda.is_initialized():
        raise StartMethodError(
            "start_method='fork' cannot be used where CUDA is in use: a copied context does not work. Take 'spawn'."
        )


class RequestNotDeliveredError(WorkerDiedError):
    """The process ended before it had the whole request, so that nothing of it was done."""


class CallProcess:
    """A process that runs a loop of `worker_main`. Used by one thread at a time, save for `kill` and `hang_up`.

    Args:
        loop: called in the process as `loop(connection, *args)`.
        args: its further arguments; pickled by value now, or inherited by a forked process.
        start_method: `spawn`, `forkserver` or `fork`.
        start_timeout: seconds from now within which the process must be ready.
        name: what errors call it.

    Raises:
        StartMethodError: fork in a process that uses CUDA, or an unknown start method.
        CheckpointStageError: `loop` or `args` cannot be pickled.
        CheckpointSaveError: the system refused another process.
    """

    def __init__(
        self,
        loop: Callable[..., None],
        args: tuple[Any, ...] = (),
        *,
        start_method: str = "spawn",
        start_timeout: float = 30.0,
        name: str = "worker process",
    ) -> None:
        check_start_method(start_method)
        self.name = name
        self._start_method = start_method
        self._start_timeout = start_timeout
        self._start_deadline = time.monotonic() + start_timeout
        forked = start_method == "fork"
        work = (loop, args) if forked else _pickled_work(loop, args, name)
        ours, theirs = multiprocessing.Pipe(duplex=True)
        try:
            with _group_signals_held(start_method):
                context = cast(
                    ProcessContext,  # what join=False returns
                    start_processes(
                        enter,
                        args=(theirs, ours if forked else None, work),
                        join=False,
                        start_method=start_method,
                    ),
                )
        except OSError as error:
            ours.close()
            raise CheckpointSaveError(f"The {name} could not be started: {error}.", error.errno) from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()  # so that the end of the process is the end of the pipe
        self.context = context
        self._connection = ours
        self._closing = threading.Lock()
        self._process = context.processes[0]
        self._ready = False
        self._taken = True  # the request that it runs, if there is one

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.context.pids()[0]

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()

    def await_ready(self) -> None:
        """Wait until the process has started; at once when it has.

        Raises:
            CheckpointTimeoutError: it was not ready within the start timeout.
            CheckpointSaveError: its start-up raised.
            WorkerDiedError: it ended before it was ready.
        """
        if self._ready:
            return
        message = (
            f"Timed out after {self._start_timeout:g}s: the {self.name} (pid {self.pid}) was not ready. "
            "Its start imports the main script again; the start-up timeout must allow for that."
        )
        self._result(READY, self._start_deadline, message, f"The {self.name} (pid {self.pid}) could not start")
        self._ready = True

    def call(self, number: int, payload: bytes, timeout: float, what: str) -> Any:
        """Send one request and wait for its answer.

        Args:
            number: from 0; an answer is taken only under the same number.
            payload: the pickled request.
            timeout: seconds for the whole.
            what: the request, for error texts, such as `request 3`.

        Raises:
            CheckpointSaveError: the request raised in the process, which lives on.
            WorkerDiedError: the process ended; RequestNotDeliveredError, when the request can be given to another one.
            CheckpointTimeoutError: no answer in time; the process has to be stopped.
        """
        deadline = time.monotonic() + timeout
        late = (
            f"The {self.name} (pid {self.pid}) did not finish {what} within {timeout:g} s; "
            "it hangs, or the timeout is too short."
        )
        doing = f" while it ran {what}"
        self._taken = False
        self._send(number, payload, deadline, late, doing)
        return self._result(number, deadline, late, f"{what} failed in the {self.name} (pid {self.pid})", doing)

    def end(self, timeout: float, farewell: bytes = b"") -> None:
        """End the process in good order, after `timeout` seconds by `stop`.

        Args:
            timeout: seconds for the process to leave.
            farewell: a last pickled request, or nothing.
        """
        deadline = time.monotonic() + timeout
        late = f"The {self.name} (pid {self.pid}) did not end within {timeout:g} s, and is stopped."
        try:
            if self._ready:  # one that still starts has nothing to lose
                self._send(END, farewell, deadline, late, "")
                if farewell:
                    self._result(END, deadline, late, f"Ending the {self.name} (pid {self.pid}) failed")
                self._process.join(max(deadline - time.monotonic(), 0))
                if self.alive:
                    raise CheckpointTimeoutError(late)
        except (CheckpointSaveError, CheckpointTimeoutError) as error:
            logger.warning("%s", error)
        self.stop()

    def stop(self) -> None:
        """End the process: SIGTERM, and half a second later SIGKILL. Nothing happens to one that has ended."""
        with self._closing:
            self._connection.close()  # shows the process that this SIGTERM is meant for it
        if self.alive:
            self._process.terminate()
            self._process.join(_TERMINATE_SECONDS)
        if self.alive:
            self._process.kill()
            self._process.join(_KILL_SECONDS)
        if self.alive:
            logger.error("the %s (pid %d) did not end on SIGKILL; it is stuck in the kernel", self.name, self.pid)
        self.context.discard_error_files()

    def kill(self) -> None:
        """SIGKILL, from any thread. The thread that waits for the process sees its death."""
        self._process.kill()

    def hang_up(self) -> None:
        """End the conversation, from any thread. The thread that waits for the process wakes up and raises."""
        with self._closing:
            if not self._connection.closed:
                with socket.socket(fileno=os.dup(self._connection.fileno())) as copy, contextlib.suppress(OSError):
                    copy.shutdown(socket.SHUT_RDWR)  # OSError: the other side was faster

    def death(self) -> WorkerDiedError:
        """The error that describes how an idle process ended."""
        return self._died("")

    def _send(self, number: int, body: bytes, deadline: float, late: str, doing: str) -> None:
        with self._as_death(doing):
            send_message(self._connection, number, body, lambda: self._wait(select.POLLOUT, deadline, late))

    def _result(self, number: int, deadline: float, late: str, what: str, doing: str = "") -> Any:
        """The content of the answer with this number."""
        with self._as_death(doing):
            while True:
                answered, body = receive_message(self._connection, lambda: self._wait(select.POLLIN, deadline, late))
                if answered == number:
                    break
                if answered == TAKEN:
                    self._taken = True
                    continue
                logger.warning("the %s answered %d where %d was asked; not used", self.name, answered, number)
        good, content = pickle.loads(body)
        if not good:
            raise as_local_error(content, what)
        return pickle.loads(content) if content is not None else None

    @contextlib.contextmanager
    def _as_death(self, doing: str) -> Iterator[None]:
        """The end of the pipe becomes the error that describes how the process ended."""
        try:
            yield
        except CheckpointTimeoutError:  # an OSError too
            raise
        except (EOFError, OSError) as error:
            death = self._died(doing)
            raise death from (death.__cause__ or error)

    def _wait(self, event: int, deadline: float, late: str) -> None:
        """Return when the pipe can be read or written without blocking; raise when it never will."""
        poll = select.poll()
        poll.register(self._connection.fileno(), event)
        while True:
            left = deadline - time.monotonic()
            # The exit code is asked for before the pipe, so that a last answer is still taken.
            ended = self._process.exitcode is not None
            if poll.poll(max(min(left, 0 if ended else _POLL_SECONDS), 0) * 1000):
                return
            if ended:
                raise EOFError
            if left <= 0:
                raise CheckpointTimeoutError(late)

    def _died(self, doing: str) -> WorkerDiedError:
        self._process.join(_EXIT_SECONDS)
        code = self._process.exitcode
        if code is None:
            return WorkerDiedError(f"The {self.name} (pid {self.pid}) closed its pipe{doing}, but still runs.")
        where = doing if self._taken else " before it had the whole request"
        if not self._ready:
            where = " before it was ready"
        hint = "" if self._ready else self._start_hint(code)
        kind = WorkerDiedError if self._taken else RequestNotDeliveredError
        error = kind(f"The {self.name} (pid {self.pid}) {describe_exit(code, self.pid)}{where}.{hint}")
        text = self.context.error_text(0)
        if text is not None:
            error.__cause__ = RemoteTraceback(text)
        return error

    def _start_hint(self, code: int) -> str:
        if code < 0 or self._start_method == "fork":
            return ""
        if _main_script_is_unguarded():
            return (
                " A started process imports the main script again, and yours does its work while it is imported: "
                'put that under `if __name__ == "__main__":`.'
            )
        return " What it printed on stderr says why."


def _pickled_work(loop: Callable[..., None], args: tuple[Any, ...], name: str) -> bytes:
    parts = {"its loop": loop, "args": args}
    return pickle_by_value((loop, args), f"What the {name} is to run", parts=parts, fix=FIX_FOR_SPAWN)


@contextlib.contextmanager
def _group_signals_held(start_method: str) -> Iterator[None]:
    """A process started here gets Ctrl-C and SIGTERM only when its handlers for them are in place."""
    # These live on and would keep what is held now for the processes of others.
    if start_method != "fork":
        resource_tracker.ensure_running()
    if start_method == "forkserver":
        forkserver.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _main_script_is_unguarded() -> bool:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return path is not None and "__main__" not in Path(path).read_text(errors="replace")
    except OSError:
        return False
