"""`MemoryCaller`: runs requests whose target is in memory, in a process that keeps snapshots there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..core.outside import OUTSIDE, Outside
from ..core.processes.serve import as_local_error
from ..core.writing.process import ByteProcess, WriterConnection
from ..errors import CheckpointTimeoutError
from .write_callers import ConnectedCaller

#: How much longer than its deadline a server may take to say why it is late.
_GRACE_SECONDS = 5.0


class Retired(NamedTuple):
    """The arenas of a server after a snapshot was dropped.

    Attributes:
        unread: those that may be filled again: no other process reads them
        read: those that other processes still read
    """

    unread: set[int]
    read: set[int]


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
        self._of: ByteProcess | None = None

    def _connect(self, timeout: float) -> WriterConnection:
        process, connection = self._connect_process(timeout), self._process
        if connection is None or process is not self._of:
            self.close()
            connection, self._of = process.open_connection(timeout), process
        return connection

    def prepare(self, timeout: float) -> None:
        """Connect, and start the process again if it has ended."""
        self._running(timeout)

    def retire(self, keep: Sequence[str], timeout: float) -> Retired:
        """Drop what this rank's server has of all snapshots but these.

        Args:
            keep: paths of the snapshots that stay, the newest last. A save that becomes whole after the trainer has
                died replaces that one alone; one that must stay then, too, is named twice.
            timeout: seconds that it may take

        Returns:
            This server's arenas. Of one that a server had which has died since, nobody knows who reads it.

        Raises:
            CheckpointSaveError: it could not
            WorkerDiedError: the server has died, and all snapshots with it
            CheckpointTimeoutError: it did not answer
        """
        connection = self._process
        if connection is None:
            return Retired(set(), set())
        header = {"kind": "retire", "keep": list(keep)}
        deadline = self.outside.now() + timeout
        held: list[int] = self._asked(connection, header, deadline, "timeouts.close")["held"]
        return Retired(self._arenas.keys() - held, self._arenas.keys() & held)

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
        header = {"kind": "listen", "secret": secret, "address": address}
        deadline = self.outside.now() + timeout
        return int(self._asked(self._running(timeout), header, deadline, "timeouts.worker_start")["port"])

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
        header = {"kind": "pull", "path": path, "homes": homes, "seconds": seconds}
        answer = self._asked(self._running(seconds), header, deadline + _GRACE_SECONDS, "timeouts.write")
        return {name: answer[name] for name in ("bytes", "sent", "seconds")}

    def _asked(
        self, connection: WriterConnection, header: Mapping[str, Any], deadline: float, key: str
    ) -> dict[str, Any]:
        """Send a frame to the server, and receive its answer; the connection is of no more use if that is late."""
        try:
            connection.send({**header, "id": next(self._numbers)}, deadline)
            answer = connection.receive(deadline, key)
        except CheckpointTimeoutError:
            self.close()
            raise
        if answer["kind"] == "failed":
            raise as_local_error(answer, f"The snapshot server could not {header['kind']}")
        return answer

    def close(self, timeout: float = 60.0) -> None:
        """Close the connection; the process belongs to another caller."""
        connection, self._process = self._process, None
        if connection is not None:
            connection.hang_up()
