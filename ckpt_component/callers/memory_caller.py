"""`MemoryCaller`: runs requests whose target is in memory, in a process that keeps snapshots there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..core.writing.process import ByteProcess, WriterConnection
from .write_callers import ConnectedCaller


class MemoryCaller(ConnectedCaller):
    """Runs requests whose target is in memory, on a connection of its own to a process that keeps snapshots.

    Args:
        connect: returns the process, which is started again if it has ended; called with a timeout
    """

    def __init__(self, connect: Callable[[float], ByteProcess]) -> None:
        super().__init__()
        self._connect_process = connect
        self._of: ByteProcess | None = None

    def _connect(self, timeout: float) -> WriterConnection:
        process, lane = self._connect_process(timeout), self._process
        if lane is None or process is not self._of:
            self.close()
            lane, self._of = process.open_lane(timeout), process
        return lane

    def prepare(self, timeout: float) -> None:
        """Connect, and start the process again if it has ended."""
        self._running(timeout)

    def retire(self, keep: Sequence[str], timeout: float) -> set[int]:
        """Drop what this rank's keeper has of all snapshots but these.

        Args:
            keep: paths of the snapshots that stay, the newest last. A save that becomes whole after the trainer has
                died replaces that one alone; one that must stay then, too, is named twice.
            timeout: seconds that it may take

        Returns:
            The numbers of the arenas that another process still reads, which must not be filled again.

        Raises:
            WorkerDiedError: the keeper has died, and all snapshots with it
            CheckpointTimeoutError: it did not answer
        """
        lane, number = self._process, next(self._numbers)
        if lane is None:
            return set()
        deadline = time.monotonic() + timeout
        lane.send({"kind": "retire", "id": number, "keep": list(keep)}, deadline)
        return set(lane.receive(deadline, "timeouts.close")["held"])

    def close(self, timeout: float = 60.0) -> None:
        """Close the connection; the process belongs to another caller."""
        lane, self._process = self._process, None
        if lane is not None:
            lane.hang_up()
