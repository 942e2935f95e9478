"""Start processes by `multiprocessing`, supervise and join them, and report how each one failed.

The contract is that of `torch.multiprocessing.spawn`, without torch. Unlike there, a child does not depend on the
thread that started it, no error file is left behind, and no process survives the failure of another. A child imports
this module, and the standard library. All others of this package start processes by `Child`.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from ..core.outside import OUTSIDE
from ..core.processes.serve import SIGNALS_OF_THE_TRAINER
from ..errors import CheckpointError, printable

logger = logging.getLogger(__name__)

START_METHODS = ("spawn", "forkserver", "fork")
#: If set to 1, processes of a fork server start in parallel; the name is torch's.
ENV_VAR_PARALLEL_START = "TORCH_MP_PARALLEL_START"

#: The sentinel shows the end of a process at once, unless a grandchild holds it open; then this poll does.
_POLL_SECONDS = 0.5
#: Between SIGTERM and SIGKILL if the caller passes no grace period.
_TERMINATE_SECONDS = 30.0
#: After SIGKILL. A process in uninterruptible I/O may survive longer and is left to the kernel.
_KILL_SECONDS = 5.0
#: Between the interrupt and the hard exit of a process whose parent has ended.
_PARENT_GRACE_SECONDS = 1.0


class StartMethodError(CheckpointError, ValueError):
    """The start method does not exist or cannot be used here; the message names one that can."""


class ProcessException(CheckpointError):
    """A supervised process failed.

    Args:
        msg: what happened
        error_index: index of the process
        error_pid: its process ID
    """

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg)
        self.msg = msg
        self.error_index = error_index
        self.error_pid = error_pid

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.msg, self.error_index, self.error_pid)


class ProcessRaisedException(ProcessException):
    """The function raised; the message contains the traceback of the other process."""

    def __str__(self) -> str:
        return "\n".join(map(printable, self.msg.split("\n")))


class ProcessExitedException(ProcessException):
    """The process was killed by a signal or exited with a nonzero code.

    Args:
        msg: what happened
        error_index: index of the process
        error_pid: its process ID
        exit_code: negative for a signal
        signal_name: such as `SIGKILL`, or None
    """

    def __init__(
        self, msg: str, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        super().__init__(msg, error_index, error_pid)
        self.exit_code = exit_code
        self.signal_name = signal_name

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name)


class ProcessContext:
    """Processes that were started together.

    Args:
        processes: started and not yet joined
        error_files: path of each process's traceback. They are in one private folder, created by the first process
            that fails, and removed when all are joined or this object is collected.

    Attributes:
        discard_error_files: removes the private folder when it is called. Safe to call twice.
    """

    def __init__(self, processes: Sequence[BaseProcess], error_files: Sequence[str]) -> None:
        self.processes = list(processes)
        self.error_files = list(error_files)
        self.sentinels = {process.sentinel: index for index, process in enumerate(self.processes)}
        folders = {os.path.dirname(path) for path in self.error_files}
        self.discard_error_files = weakref.finalize(self, _remove_folders, folders, os.getpid())

    def pids(self) -> list[int]:
        """Process IDs, in order."""
        return [int(process.pid or 0) for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until a process ends, and check how it ended.

        Args:
            timeout: seconds to wait; None: as long as the processes run
            grace_period: after a failure, seconds for the other processes to end by themselves, and again between
                SIGTERM and SIGKILL. None: SIGTERM at once, and 30 s between the two.

        Returns:
            True if all processes have ended successfully, False if some still run.

        Raises:
            ProcessRaisedException: a function raised. All processes have ended.
            ProcessExitedException: a process was killed or exited with a nonzero code. All processes have ended.
        """
        ended = self._wait_for_any(timeout)
        self.sentinels = {fd: index for fd, index in self.sentinels.items() if index not in ended}
        failed = [index for index in ended if self.processes[index].exitcode != 0]
        if failed:
            if grace_period is not None:
                _join_all(self.processes, grace_period)
            end_processes(self.processes, _TERMINATE_SECONDS if grace_period is None else grace_period)
            self.sentinels.clear()
            # If several failed together, prefer one with a traceback.
            error = self._error_of(next((index for index in failed if self.error_text(index)), failed[0]))
            self.discard_error_files()
            raise error
        if not self.sentinels:
            self.discard_error_files()
        return not self.sentinels

    def error_text(self, index: int) -> str | None:
        """The traceback of a process, or None."""
        try:
            return Path(self.error_files[index]).read_text(errors="replace") or None
        except FileNotFoundError:
            return None

    def _wait_for_any(self, timeout: float | None) -> list[int]:
        deadline = None if timeout is None else OUTSIDE.now() + timeout
        while self.sentinels:
            left = _POLL_SECONDS if deadline is None else min(deadline - OUTSIDE.now(), _POLL_SECONDS)
            ready = multiprocessing.connection.wait(list(self.sentinels), max(left, 0))
            for sentinel in ready:
                if isinstance(sentinel, int):
                    self.processes[self.sentinels[sentinel]].join(0.05)
            ended = [index for index in self.sentinels.values() if self.processes[index].exitcode is not None]
            if ended or (deadline is not None and OUTSIDE.now() >= deadline):
                return ended
        return []

    def _error_of(self, index: int) -> ProcessException:
        process = self.processes[index]
        pid, code = int(process.pid or 0), process.exitcode
        text = self.error_text(index)
        if text:
            return ProcessRaisedException(
                f"\n\n-- Process {index} terminated with the following error:\n{text}", index, pid
            )
        if code is not None and code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"<Unknown signal {-code}>"
            return ProcessExitedException(f"process {index} terminated with signal {name}", index, pid, code, name)
        return ProcessExitedException(f"process {index} terminated with exit code {code}", index, pid, code or 0)


class SpawnContext(ProcessContext):
    """The old name of `ProcessContext`."""

    def __init__(self, processes: Sequence[BaseProcess], error_files: Sequence[str]) -> None:
        warnings.warn("SpawnContext is an old name; use ProcessContext.", stacklevel=2)
        super().__init__(processes, error_files)


def end_processes(processes: Sequence[BaseProcess], grace_seconds: float) -> None:
    """End running processes by SIGTERM, and after `grace_period` seconds by SIGKILL."""
    steps = (("SIGTERM", BaseProcess.terminate, grace_seconds), ("SIGKILL", BaseProcess.kill, _KILL_SECONDS))
    for name, end, seconds in steps:
        alive = [process for process in processes if process.is_alive()]
        for process in alive:
            logger.warning("Terminating process %s via signal %s", process.pid, name)
            end(process)
        _join_all(alive, seconds)
    for process in processes:
        if process.is_alive():
            logger.error("process %s did not end on SIGKILL; it is stuck in the kernel and left behind", process.pid)


def _join_all(processes: Sequence[BaseProcess], seconds: float) -> None:
    deadline = OUTSIDE.now() + seconds
    for process in processes:
        process.join(max(deadline - OUTSIDE.now(), 0))


def check_start_method_exists(start_method: str) -> None:
    """Raise StartMethodError if there is no such start method."""
    if start_method not in START_METHODS:
        raise StartMethodError(f"There is no start method {start_method!r}; take one of {', '.join(START_METHODS)}.")


def start_processes(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str | None = "spawn",
) -> ProcessContext | None:
    """Run `fn(i, *args)` in `nprocs` processes, i from 0.

    With `forkserver` and TORCH_MP_PARALLEL_START=1 in the environment they start in parallel. A child whose parent has
    died, also by `kill -9`, is interrupted as by Ctrl-C and exits a second later.

    Args:
        fn: the function; with spawn and forkserver at the top level of a module
        args: further arguments, the same for all; pickled with spawn and forkserver
        nprocs: number of processes
        join: wait until all have ended, without a limit; otherwise return immediately
        daemon: end the children when this process exits; they may then have no children of their own
        start_method: `spawn`, `forkserver` or `fork`; None: the default of `multiprocessing` on this system

    Returns:
        None with `join`, the started processes otherwise.

    Raises:
        ProcessRaisedException, ProcessExitedException: with `join`, a process failed
        StartMethodError: there is no such start method, or this process must not start processes
        OSError: the system could not start a process; those already started are ended
    """
    start_method = start_method or multiprocessing.get_start_method()
    check_start_method_exists(start_method)
    if multiprocessing.current_process().daemon:
        raise StartMethodError("A daemon of multiprocessing may start no process; start this one with daemon=False.")
    mp = multiprocessing.get_context(start_method)
    folder = os.path.join(tempfile.gettempdir(), f"ckpt-errors-{secrets.token_hex(8)}")
    error_files = [os.path.join(folder, f"{index}.txt") for index in range(nprocs)]
    processes: list[BaseProcess] = [
        mp.Process(target=run_supervised, args=(fn, index, args, error_file), daemon=daemon)  # type: ignore[attr-defined]
        for index, error_file in enumerate(error_files)
    ]
    try:
        if start_method == "forkserver" and os.environ.get(ENV_VAR_PARALLEL_START, "0") == "1":
            logger.info("starting %d processes in parallel", nprocs)
            with OUTSIDE.pool(nprocs, "ckpt-start") as pool:
                starts = [pool.submit(process.start) for process in processes]
            for start in starts:  # all are started before the first error is raised
                start.result(0)
        else:
            for process in processes:
                process.start()
    except BaseException:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join(_KILL_SECONDS)
        _remove_folders({folder}, os.getpid())
        raise
    context = ProcessContext(processes, error_files)
    if not join:
        return context
    while not context.join():
        pass
    return None


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """`start_processes` with spawn; another `start_method` is ignored with a warning."""
    if start_method != "spawn":
        warnings.warn(
            f"spawn() starts processes by 'spawn' alone, not by {start_method!r}; use start_processes() for that.",
            FutureWarning,
            stacklevel=2,
        )
    return start_processes(fn, args, nprocs, join, daemon, start_method="spawn")


def _remove_folders(folders: set[str], owner: int) -> None:
    # A forked child may collect its copy of the context and must not remove the folder.
    if os.getpid() == owner:
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)


def run_supervised(fn: Callable[..., Any], index: int, args: tuple[Any, ...], error_file: str) -> None:
    """In the process: call `fn(index, *args)`, and exit with 1 if it raises.

    When the parent process ends, the main thread is interrupted as by Ctrl-C; if the process still runs a second later,
    it exits at once.

    Args:
        fn: the function
        index: number of the process
        args: further arguments
        error_file: where the traceback goes; its private folder is created for it
    """
    parent = multiprocessing.parent_process()
    assert parent is not None  # as `multiprocessing` has started this process
    OUTSIDE.start("ckpt-parent-watch", _leave_with, parent.sentinel, parent.pid)
    try:
        fn(index, *args)
    except KeyboardInterrupt:
        pass  # the parent has died, or the user pressed Ctrl-C, which the parent reports
    except Exception:
        text = traceback.format_exc()
        try:
            os.makedirs(os.path.dirname(error_file), mode=0o700, exist_ok=True)
            Path(error_file).write_text(text)
        except OSError as error:
            print(f"{text}\n(could not leave this for the parent process: {error})", file=sys.stderr)
        sys.exit(1)


def _leave_with(sentinel: int, parent_pid: int) -> None:
    watched = [sentinel]
    try:
        # A sibling may have inherited the sentinel's pipe and hold it open; a pidfd is not affected by that.
        watched.append(os.pidfd_open(parent_pid))
    except ProcessLookupError:
        watched = []  # it has exited
    except (OSError, AttributeError) as error:
        logger.info("watching the parent process by its pipe alone, because pidfd_open failed: %s", error)
    if watched:
        multiprocessing.connection.wait(watched)  # no deadline: this daemon thread has nothing else to do
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    OUTSIDE.sleep(_PARENT_GRACE_SECONDS)
    os._exit(1)


@contextlib.contextmanager
def group_signals_held(start_method: str) -> Iterator[None]:
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
def main_kept_out() -> Iterator[None]:
    """Processes started in this block do not import the main script, as after `python -m package`."""
    main = sys.modules["__main__"]
    # multiprocessing skips this name
    spec, main.__spec__ = main.__spec__, ModuleSpec("ckpt_component.__main__", None)
    try:
        yield
    finally:
        main.__spec__ = spec


def at_the_end_of(owner: object, priority: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function when an object is collected or the interpreter exits, also that of a child of `multiprocessing`.

    Such a child runs no handlers of `atexit`.

    Args:
        owner: the object
        priority: higher ones come first at the exit
        function: must not refer to the object
        *arguments: of the function; neither may these
    """
    Finalize(owner, function, arguments, exitpriority=priority)
