"""The trainer's side of the background writer process: start it, send it work, detect its death, stop it.

It is started with `subprocess`, not with `multiprocessing`: a `multiprocessing` child would import the training
script again, and torch with it (2 to 4 s and 270 MB instead of 20 to 70 ms and 15 MB).
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

from ...errors import CheckpointSaveError, CheckpointTimeoutError, WorkerDiedError
from ..processes.exit_text import describe_exit
from ..processes.framing import Frame, receive_frame, send_frame

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from ckpt_component.core.writing.worker import main; main(int(sys.argv[2]))"
)
#: Settings of malloc: memory that a save has freed is returned to the system, whichever thread used it.
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
#: A dead worker is detected at once by the closed socket, or by this poll if a forked process keeps the socket open.
_POLL_SECONDS = 0.5
_KILL_SECONDS = 5.0


def await_frame(sock: socket.socket, deadline: float, is_alive: Callable[[], bool]) -> Frame | None:
    """Wait for the next frame of a process; None if the process has closed its end or died.

    Args:
        sock: connected to the process.
        deadline: monotonic seconds.
        is_alive: whether the process runs. Detects a death that the socket does not show because another process,
            forked while this one was started, keeps its end open.

    Raises:
        TimeoutError: no frame arrived in time.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while True:
        alive, remaining = is_alive(), deadline - time.monotonic()  # first, so that a last frame is not missed
        if poll.poll(max(min(remaining, _POLL_SECONDS if alive else 0), 0) * 1000):
            # A frame has begun to arrive; this timeout catches a process that stops in the middle of it.
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
        start_timeout: seconds within which the process must report that it is ready.

    Raises:
        CheckpointTimeoutError: the process did not report in time.
        WorkerDiedError: the process exited before it reported.
    """

    def __init__(self, start_timeout: float) -> None:
        trainer_end, worker_end = socket.socketpair()
        self._sock = trainer_end
        try:
            # -I -S: no site-packages and no PYTHON* settings, so that nothing slow or foreign is imported.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, _PACKAGE_ROOT, str(worker_end.fileno())],
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **_MALLOC},
            )
        except OSError as error:
            trainer_end.close()
            raise CheckpointSaveError(f"The writer process could not be started: {error}.", error.errno) from error
        finally:
            worker_end.close()
        try:
            first = self.receive(time.monotonic() + start_timeout, "timeouts.worker_start")
            if first["kind"] != "ready":
                raise CheckpointSaveError(f"The writer process first sent a frame {first['kind']!r}, not 'ready'.")
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
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
        """Wait for the next answer. `key` is the setting that the deadline comes from, for the error text."""
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
        """Ask the process to exit, and kill it after `timeout` seconds. Safe to call twice."""
        with contextlib.suppress(OSError):  # it may have ended already
            self._sock.settimeout(timeout)
            send_frame(self._sock, {"kind": "close"})
        self._sock.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the process."""
        self._sock.close()
        self._process.kill()
        # A process in uninterruptible I/O cannot be killed; leave it to the kernel.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)

    def _died(self) -> WorkerDiedError:
        try:
            code = self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return WorkerDiedError(f"The writer process (pid {self.pid}) closed its connection but still runs.")
        return WorkerDiedError(f"The writer process (pid {self.pid}) {describe_exit(code)}.")
