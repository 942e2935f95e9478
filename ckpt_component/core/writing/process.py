"""The trainer's side of the background writer process: start it, send it work, tell its death, stop it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import CheckpointSaveError, CheckpointTimeoutError, WorkerDiedError
from ..outside import OUTSIDE, Outside
from ..processes.framing import Blobs, Channel
from ..processes.serve import as_local_error
from ..processes.start import Child, describe_exit

#: Settings of malloc: memory that a save has freed is returned to the system, whichever thread used it.
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
_EXIT_SECONDS = 5.0


class WriterConnection:
    """A connection to a running writer process.

    Args:
        child: the process
        channel: the connection
    """

    def __init__(self, child: Child, channel: Channel) -> None:
        self._child = child
        self._channel = channel
        self._outside = child.outside

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._child.alive

    def expect_ready(self, timeout: float) -> None:
        """Wait until the process has reported that it is ready."""
        first = self.receive(self._outside.now() + timeout, "timeouts.worker_start")
        if first["kind"] == "failed":
            raise as_local_error(first, "The writer process could not begin")
        if first["kind"] != "ready":
            raise CheckpointSaveError(f"The writer process first sent a frame {first['kind']!r}, not 'ready'.")

    def send(self, header: Mapping[str, Any], deadline: float, blobs: Blobs = (), fds: Sequence[int] = ()) -> None:
        """Send one frame before `deadline`, in seconds of `Outside.now`."""
        try:
            self._channel.send(header, deadline, blobs, fds)
        except TimeoutError as error:
            raise CheckpointTimeoutError(
                f"The writer process (pid {self.pid}) did not take a request in time; see timeouts.write."
            ) from error
        except OSError as error:
            raise self._died() from error

    def receive(self, deadline: float, key: str) -> dict[str, Any]:
        """Wait for the next answer. `key` is the setting that the deadline comes from, for the error text."""
        try:
            frame = self._channel.receive(deadline)
        except TimeoutError as error:
            raise CheckpointTimeoutError(
                f"The writer process (pid {self.pid}) did not answer in time; it hangs, or {key} is too short."
            ) from error
        if frame is None:
            raise self._died()
        return frame[0]

    def hang_up(self) -> None:
        """Close the connection; the process lives on. Safe to call twice."""
        self._channel.close()

    def kill(self) -> None:
        """Kill the process."""
        self._child.kill()

    def _died(self) -> WorkerDiedError:
        code = self._child.wait(_EXIT_SECONDS)
        ended = "closed its connection but still runs" if code is None else describe_exit(code)
        return WorkerDiedError(f"The writer process (pid {self.pid}) {ended}.")


class WriterProgram(NamedTuple):
    """What a writer process runs: a module, and the job of its `main`."""

    module: str
    job: Mapping[str, Any]


class ByteProcess(WriterConnection):
    """One running writer process.

    Args:
        start_timeout: seconds within which the process must report that it is ready
        program: its module, whose `main` does what `worker` does and more, and the arguments of that; None: `worker`
        outside: of this process

    Raises:
        CheckpointTimeoutError: the process did not report in time
        WorkerDiedError: the process exited before it reported
    """

    def __init__(self, start_timeout: float, program: WriterProgram | None = None, outside: Outside = OUTSIDE) -> None:
        try:
            # -I -S: no site-packages and no PYTHON* settings, so that nothing slow or foreign is imported.
            child = Child(
                *(program or WriterProgram("ckpt_component.core.writing.worker", {})),
                flags=("-I", "-S"),
                environment=_MALLOC,
                own_session=program is not None,
                outside=outside,
            )
        except OSError as error:
            raise CheckpointSaveError(f"The writer process could not be started: {error}.", error.errno) from error
        super().__init__(child, child)
        try:
            self.expect_ready(start_timeout)
        except BaseException:
            self.kill()
            raise

    def open_connection(self, timeout: float) -> WriterConnection:
        """Open one more connection, on which the process works at the same time; only if its program has several."""
        ours, theirs = self._outside.pair()
        try:
            self.send({"kind": "connect"}, self._outside.now() + timeout, fds=[theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        connection = WriterConnection(self._child, Channel(ours, lambda: self._child.alive, outside=self._outside))
        connection.expect_ready(timeout)
        return connection

    def close(self, timeout: float) -> None:
        """Ask the process to exit, and kill it after `timeout` seconds. Safe to call twice."""
        with contextlib.suppress(OSError):  # it may have ended already
            self._child.send({"kind": "close"}, self._outside.now() + timeout)
        self._child.end(timeout)

    def leave(self) -> None:
        """Let the process live on."""
        self._child.leave()
