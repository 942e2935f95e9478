"""A process that runs a user's functions, from its parent's side: what a `Job` needs of it."""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from ..core.job import Job
from ..core.outside import OUTSIDE, Outside
from ..core.processes.framing import Channel
from ..errors import CheckpointSaveError
from .pickling import pickle_by_value
from .spawn import (
    ProcessContext,
    StartMethodError,
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
