"""The trainer's side of the background writer process: start it, give it work, notice its death, end it.

It is started with `subprocess` and not with `multiprocessing`: a child of `multiprocessing` would import the
training script again, and torch with it (2 to 4 s and 270 MB, where this one takes 20 to 70 ms and 15 MB).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointSaveError, CheckpointTimeoutError, WorkerDiedError
from .exit_text import describe_exit
from .framing import Frame, receive_frame, send_frame

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from ckpt_component.writing.worker import main; main(int(sys.argv[2]))"
)
#: For its C library: what one save has freed goes back to the system, whichever thread it was of.
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
#: A dead worker is noticed by the closed socket at once, or by this poll when a forked process keeps the socket open.
_POLL_SECONDS = 0.5
_KILL_SECONDS = 5.0


def await_frame(sock: socket.socket, deadline: float, is_alive: Callable[[], bool]) -> Frame | None:
    """The next frame of a process; None when it has closed its end, or has died.

    Args:
        sock: to the process.
        deadline: monotonic seconds.
        is_alive: whether the process runs; one that is dead is noticed also when another process, forked while this
            one was started, keeps its end open.

    Raises:
        TimeoutError: it did not come in time.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while True:
        alive, remaining = is_alive(), deadline - time.monotonic()  # before the look, so that a last frame is taken
        if poll.poll(max(min(remaining, _POLL_SECONDS if alive else 0), 0) * 1000):
            # It is already on its way; a process stopped in the middle of it is caught here.
            sock.settimeout(max(remaining, 1.0))
            try:
                return receive_frame(sock)
            except TimeoutError:
                raise
            except OSError:
                return None
        if not alive:
            return None
        if remaining <= 0:
            raise TimeoutError


class ByteProcess:
    """One running writer process.

    Args:
        start_timeout: seconds within which it must answer that it is ready.

    Raises:
        CheckpointTimeoutError: it did not answer in time.
        WorkerDiedError: it ended before it answered.
    """

    def __init__(self, start_timeout: float) -> None:
        ours, theirs = socket.socketpair()
        self._sock = ours
        try:
            # -I -S: no site-packages and no PYTHON* settings, so that nothing slow or foreign is imported.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, _PACKAGE_ROOT, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **_MALLOC},
            )
        except OSError as error:
            ours.close()
            raise CheckpointSaveError(f"The writer process could not be started: {error}.", error.errno) from error
        finally:
            theirs.close()
        try:
            first = self.receive(time.monotonic() + start_timeout, "timeouts.worker_start")
            if first["kind"] != "ready":
                raise CheckpointSaveError(f"The writer process began with a frame {first['kind']!r}, and not 'ready'.")
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def send(
        self,
        header: dict[str, Any],
        deadline: float,
        blobs: Sequence[bytes | memoryview] = (),
        fds: Sequence[int] = (),
    ) -> None:
        """Send one frame before `deadline` (monotonic seconds)."""
        self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            send_frame(self._sock, header, blobs, fds)
        except TimeoutError as error:
            raise CheckpointTimeoutError(
                f"The writer process (pid {self.pid}) did not take a request in time; see timeouts.write."
            ) from error
        except OSError as error:
            raise self._died() from error

    def receive(self, deadline: float, key: str) -> dict[str, Any]:
        """The next answer; `key` is the setting that the deadline comes from, for the error text."""
        try:
            frame = await_frame(self._sock, deadline, lambda: self.alive)
        except TimeoutError as error:
            raise CheckpointTimeoutError(
                f"The writer process (pid {self.pid}) did not answer in time; it hangs, or {key} is too short."
            ) from error
        if frame is None:
            raise self._died()
        return frame[0]

    def close(self, timeout: float) -> None:
        """End it: politely, and after `timeout` seconds by SIGKILL. Safe to call twice."""
        with contextlib.suppress(OSError):  # it may have ended already
            self._sock.settimeout(timeout)
            send_frame(self._sock, {"kind": "close"})
        self._sock.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        self._sock.close()
        self._process.kill()
        # A process in uninterruptible I/O cannot be killed; it is then left to the kernel.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)

    def _died(self) -> WorkerDiedError:
        try:
            code = self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return WorkerDiedError(f"The writer process (pid {self.pid}) closed its connection but still runs.")
        return WorkerDiedError(f"The writer process (pid {self.pid}) {describe_exit(code)}.")
