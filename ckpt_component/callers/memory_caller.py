"""`MemoryCaller`: runs requests whose target is in memory, in a process that keeps snapshots there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.outside import OUTSIDE, Outside
from ..core.processes.remote_error import as_local_error
from ..core.writing.process import ByteProcess, WriterConnection
from ..errors import CheckpointTimeoutError
from .write_callers import ConnectedCaller

#: How much longer than its deadline a server may take to say why it is late.
_GRACE_SECONDS = 5.0


class MemoryCaller(ConnectedCaller):
    """Runs requests whose target is in memory, on a connection of its own to a process that keeps snapshots.

    Args:
        connect: returns the process, which is started again if it has ended; called with a timeout
        outside: what it runs in
    """

    def __init__(self, connect: Callable[[float], ByteProcess], outside: Outside = OUTSIDE) -> None:
        super().__init__()
        self.outside = outside
        self._connect_process = connect

    def _connect(self, timeout: float) -> WriterConnection:
        self.close()
        return self._connect_process(timeout).open_connection(timeout)

    def prepare(self, timeout: float) -> None:
        """Connect, and start the process again if it has ended."""
        self._running(timeout)

    def retire(self, keep: Sequence[str], timeout: float) -> dict[int, bool]:
        """Drop what this rank's server has of all snapshots but these.

        Args:
            keep: paths of the snapshots that stay, the newest last. A save that becomes whole after the trainer has
                died replaces that one alone; one that must stay then, too, is named twice.
            timeout: seconds that it may take

        Returns:
            Whether other processes still read this server's arenas, by their numbers. Without those that a server had
            which has died since: nobody knows who reads them.

        Raises:
            CheckpointSaveError: it could not
            WorkerDiedError: the server has died, and all snapshots with it
            CheckpointTimeoutError: it did not answer
        """
        connection = self._process
        if connection is None:
            return {}
        deadline = self.outside.now() + timeout
        held = self._asked("retire", connection, deadline, "timeouts.close", keep=list(keep))["held"]
        return {number: number in held for number in self._arenas}

    def listen(self, secret: str, address: str, timeout: float) -> int:
        """Have this rank's server let servers and trainers of other hosts in. A second call changes nothing.

        Args:
            secret: of the run, which they must know
            address: an address of this host that they reach
            timeout: seconds that it may take

        Returns:
            The TCP port, another one when the server was started again.

        Raises:
            CheckpointSaveError: it cannot listen there
            WorkerDiedError: the server has died
            CheckpointTimeoutError: it did not answer
        """
        deadline, connection = self.outside.now() + timeout, self._running(timeout)
        key = "timeouts.worker_start"
        return int(self._asked("listen", connection, deadline, key, secret=secret, address=address)["port"])

    def pull(
        self, path: str, homes: Sequence[tuple[Sequence[Any], float | None]], deadline: float
    ) -> Mapping[str, Any]:
        """Have this rank's server keep replicas of what other ranks have of a snapshot. Waits until all are there.

        Args:
            path: of the snapshot, which is whole and stays until then
            homes: the servers of those ranks, and the most bytes to ask each for in a second; None: no limit
            deadline: seconds of `Outside.now`

        Returns:
            `bytes`, the size of all files; `sent`, bytes of images that came over the network, as some files are there
            already; `seconds`.

        Raises:
            CheckpointSaveError: one of the replicas is not there; it says why
            WorkerDiedError: this rank's server has died
            CheckpointTimeoutError: it did not answer
        """
        seconds = max(deadline - self.outside.now(), 0.0)
        connection, until = self._running(seconds), deadline + _GRACE_SECONDS
        return self._asked("pull", connection, until, "timeouts.write", path=path, homes=homes, seconds=seconds)

    def _asked(
        self, kind: str, connection: WriterConnection, deadline: float, key: str, **values: Any
    ) -> dict[str, Any]:
        """Send a frame to the server, and receive its answer; the connection is of no more use if that is late."""
        try:
            connection.send({"kind": kind, **values, "id": next(self._numbers)}, deadline)
            answer = connection.receive(deadline, key)
        except CheckpointTimeoutError:
            self.close()
            raise
        if answer["kind"] == "failed":
            raise as_local_error(answer, f"The snapshot server could not {kind}")
        return answer

    def close(self, timeout: float = 60.0) -> None:
        """Close the connection; the process belongs to another caller."""
        connection, self._process = self._process, None
        if connection is not None:
            connection.hang_up()
