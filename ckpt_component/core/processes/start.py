"""Start a child process with one pipe to it, and say in words how it ended."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..options import IoPriority
from ..outside import OUTSIDE, Outside, Thread
from .framing import Channel

_LIKELY_CAUSES = {
    signal.SIGKILL: "probably the out-of-memory killer",
    signal.SIGBUS: "probably a full /dev/shm, or a file that shrank under a mapping",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGXCPU: "over its CPU time limit",
}


def signal_name(number: int) -> str:
    """Name of a signal, such as `SIGKILL`; `signal 63` for one that Python has no name for."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(exitcode: int | None, pid: int | None = None) -> str:
    """Describe how a process exited, as the second half of a sentence.

    Args:
        exitcode: as `multiprocessing` and `subprocess` report it: negative for a signal, None while it runs
        pid: process id, given where the kernel's log may have more

    Returns:
        For example `exited with code 3`, or `was killed by SIGKILL (probably the out-of-memory killer)`.
    """
    if exitcode is None:
        return "still runs"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    text = f"was killed by {signal_name(-exitcode)}"
    cause = next((words for number, words in _LIKELY_CAUSES.items() if number == -exitcode), None)
    if cause is not None:
        log = f", see dmesg for pid {pid}" if -exitcode == signal.SIGKILL and pid is not None else ""
        text += f" ({cause}{log})"
    return text


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
        outside: of this process

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
        outside: Outside = OUTSIDE,
    ) -> None:
        ours, theirs = outside.pair()
        try:
            process = outside.launch(
                module,
                theirs,
                flags=flags,
                environment=environment,
                own_session=own_session,
                reads_output=log is not None,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        super().__init__(ours, lambda: process.poll() is None, outside=outside)
        self._process, self.pid = process, process.pid
        self._output: Thread | None = None
        if log is not None:
            self._output = outside.start("ckpt-child-output", self._repeat, log)
        try:
            with contextlib.suppress(ConnectionError):  # it has ended, as `receive` will tell
                self.send(job, outside.now() + _SEND_SECONDS)
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
        code = self._process.wait(timeout)
        if code is not None and self._output is not None:
            self._output.join(timeout)
        return code

    def end(self, timeout: float) -> int | None:
        """Hang up, and kill the process if it does not end in `timeout` seconds. From any thread. Returns as `wait`."""
        self.hang_up(listens=False)
        code = self.wait(timeout)
        if code is None:
            return self.kill()
        self.close()
        return code

    def leave(self) -> None:
        """Hang up, and let the process live on by itself: it has its own session, and knows when to end."""
        self.close()
        self._process.leave()

    def kill(self) -> int | None:
        """Kill the process, from any thread. Returns as `wait`; None: in uninterruptible I/O, left to the kernel."""
        self._process.kill()
        code = self.wait(_KILL_SECONDS)
        self.close()
        return code

    def _repeat(self, log: Callable[[str], None]) -> None:
        for line in self._process.lines():
            log(line.decode(errors="replace").rstrip())


def start_in_background(
    module: str, job: Mapping[str, Any], log: Callable[[str], None] | None = None, outside: Outside = OUTSIDE
) -> Child:
    """Start a process of low priority that works beside a run, in its own session. Arguments as for `Child`."""
    child = Child(module, job, environment={"OMP_NUM_THREADS": "1"}, own_session=True, log=log, outside=outside)
    outside.lower_priority(child.pid, _NICE, IoPriority.low)
    return child
