"""Start a process of this package, talk with it, and end it: the only place that starts one.

It is started with `subprocess`, not with `multiprocessing`: a `multiprocessing` child would import the training
script again, and torch with it (2 to 4 s and 270 MB instead of 20 to 70 ms and 15 MB). Its side is `serve`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..options import IoPriority
from .framing import Channel
from .priority import lower_priority

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
#: The arguments are the folder of this package and the descriptor of the connection.
_CODE = "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; from {} import main; main()"
_SEND_SECONDS = 30.0
_KILL_SECONDS = 5.0
_NICE = 15


class Child(Channel):
    """A process that runs the function `main` of a module, which calls `serve`; and the connection to it.

    Args:
        module: its full name
        job: what to do, as plain values; sent to the process, so it may hold secrets
        flags: of the interpreter
        environment: variables to set there
        own_session: signals to the process group of this process do not reach it
        log: called in a thread with each line that it prints, so that a log to which this process is piped ends with
            this process. None: only its stderr goes where this process's goes.

    Attributes:
        pid: its process ID

    Raises:
        OSError: the system could not start it, or it did not take the job
    """

    def __init__(
        self,
        module: str,
        job: Mapping[str, Any],
        *,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        own_session: bool = False,
        log: Callable[[str], None] | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                [sys.executable, *flags, "-c", _CODE.format(module), _PACKAGE_ROOT, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if log is None else subprocess.PIPE,
                stderr=None if log is None else subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=own_session,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        super().__init__(ours, lambda: process.poll() is None)
        self._process, self.pid = process, process.pid
        self._output: threading.Thread | None = None
        if log is not None:
            self._output = threading.Thread(target=self._repeat, args=(log,), name="ckpt-child-output", daemon=True)
            self._output.start()
        try:
            with contextlib.suppress(ConnectionError):  # it has ended, as `receive` will tell
                self.send(job, time.monotonic() + _SEND_SECONDS)
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def wait(self, timeout: float) -> int | None:
        """Wait at most `timeout` seconds for the end of the process.

        Returns:
            The exit code as `subprocess` has it, negative for a signal; None: the process is still running.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
            if self._output is not None:
                self._output.join(timeout)
        return self._process.returncode

    def end(self, timeout: float) -> int | None:
        """Hang up, and kill the process if it does not end in `timeout` seconds. From any thread. Returns as `wait`."""
        self.hang_up(listens=False)
        if self.wait(timeout) is None:
            return self.kill()
        self.close()
        return self._process.returncode

    def leave(self) -> None:
        """Hang up, and let the process live on by itself: it has a session of its own, and knows when to end."""
        self.close()
        self._process.returncode = 0  # nobody waits for it: else `subprocess` would warn when this object is freed

    def kill(self) -> int | None:
        """Kill the process, from any thread. Returns as `wait`; None: in uninterruptible I/O, left to the kernel."""
        self._process.kill()
        code = self.wait(_KILL_SECONDS)
        self.close()
        return code

    def _repeat(self, log: Callable[[str], None]) -> None:
        assert self._process.stdout is not None  # as it is captured
        with self._process.stdout as lines:
            for line in lines:
                log(line.decode(errors="replace").rstrip())


def start_in_background(module: str, job: Mapping[str, Any], log: Callable[[str], None] | None = None) -> Child:
    """Start a process of low priority that works beside a run, in a session of its own. Arguments as for `Child`."""
    child = Child(module, job, environment={"OMP_NUM_THREADS": "1"}, own_session=True, log=log)
    lower_priority(child.pid, _NICE, IoPriority.low)
    return child
