"""Start processes, supervise and join them, and report how each one failed.

The contract is that of `torch.multiprocessing.spawn`, without torch. Unlike there, a child does not depend on the
thread that started it, no error file is left behind, and no process survives the failure of another.
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
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, printable
from .worker_main import run_supervised

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
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.sentinels:
            left = _POLL_SECONDS if deadline is None else min(deadline - time.monotonic(), _POLL_SECONDS)
            ready = multiprocessing.connection.wait(list(self.sentinels), max(left, 0))
            for sentinel in ready:
                if isinstance(sentinel, int):
                    self.processes[self.sentinels[sentinel]].join(0.05)
            ended = [index for index in self.sentinels.values() if self.processes[index].exitcode is not None]
            if ended or (deadline is not None and time.monotonic() >= deadline):
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
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))


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
            with ThreadPoolExecutor(max(nprocs, 1), thread_name_prefix="ckpt-start") as pool:
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
