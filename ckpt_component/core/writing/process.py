"""The trainer's side of the background writer process: start it, send it work, tell its death, stop it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import CheckpointSaveError, CheckpointTimeoutError, WorkerDiedError
from ..processes.exit_text import describe_exit
from ..processes.framing import Blobs
from ..processes.start import Child

#: Settings of malloc: memory that a save has freed is returned to the system, whichever thread used it.
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
_EXIT_SECONDS = 5.0


class ByteProcess:
    """One running writer process.

    Args:
        start_timeout: seconds within which the process must report that it is ready

    Raises:
        CheckpointTimeoutError: the process did not report in time
        WorkerDiedError: the process exited before it reported
    """

    def __init__(self, start_timeout: float) -> None:
        try:
            # -I -S: no site-packages and no PYTHON* settings, so that nothing slow or foreign is imported.
            self._child = Child("ckpt_component.core.writing.worker", {}, flags=("-I", "-S"), environment=_MALLOC)
        except OSError as error:
            raise CheckpointSaveError(f"The writer process could not be started: {error}.", error.errno) from error
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
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._child.alive

    def send(self, header: Mapping[str, Any], deadline: float, blobs: Blobs = (), fds: Sequence[int] = ()) -> None:
        """Send one frame before `deadline` (monotonic seconds)."""
        try:
            self._child.send(header, deadline, blobs, fds)
        except TimeoutError as error:
            raise CheckpointTimeoutError(
                f"The writer process (pid {self.pid}) did not take a request in time; see timeouts.write."
            ) from error
        except OSError as error:
            raise self._died() from error

    def receive(self, deadline: float, key: str) -> dict[str, Any]:
        """Wait for the next answer. `key` is the setting that the deadline comes from, for the error text."""
        try:
            frame = self._child.receive(deadline)
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
            self._child.send({"kind": "close"}, time.monotonic() + timeout)
        self._child.end(timeout)

    def kill(self) -> None:
        """Kill the process."""
        self._child.kill()

    def _died(self) -> WorkerDiedError:
        code = self._child.wait(_EXIT_SECONDS)
        ended = "closed its connection but still runs" if code is None else describe_exit(code)
        return WorkerDiedError(f"The writer process (pid {self.pid}) {ended}.")
