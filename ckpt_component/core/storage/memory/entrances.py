"""Where clients of a keeper come in: its socket on this host, or a TCP port; and who may."""

from __future__ import annotations

import errno
import logging
from abc import ABC, abstractmethod
from functools import partial

from ...outside import OUTSIDE, Outside, Socket
from ...processes.framing import Channel
from .keeper_sockets import SocketPlace
from .peer_sockets import greet_peer, listen_to_peers

logger = logging.getLogger(__name__)

_REFUSAL_SECONDS = 10.0


class Entrance(ABC):
    """A way to a keeper. Opened once."""

    @abstractmethod
    def open(self) -> Socket:
        """Listen; returns what listens, owned by the caller. Raises OSError."""

    @abstractmethod
    def admit(self, sock: Socket) -> Channel:
        """Let a client in.

        Args:
            sock: its connection

        Raises:
            OSError: it may not come in, as it was told, or it hung up
        """

    @abstractmethod
    def close(self) -> None:
        """Remove what clients find it by."""


class HostEntrance(Entrance):
    """The socket of a rank, for processes of one user of this host.

    Args:
        place: where the sockets of the run are
        rank: whose keeper it leads to
        user: whose processes may come in
    """

    def __init__(self, place: SocketPlace, rank: int, user: int) -> None:
        self._place = place
        self._rank = rank
        self._user = user
        self._number = 0

    def open(self) -> Socket:
        """Listen, in the place of a predecessor; raises as `SocketPlace.listen`."""
        listener, self._number = self._place.listen(self._rank)
        return listener

    def admit(self, sock: Socket) -> Channel:
        """Let a process of the user in; see the base class."""
        outside = self._place.outside
        user, pid = outside.credentials(sock)
        # A connection may outlive its client's process, in one that it forked.
        channel = Channel(sock, partial(outside.is_running, pid), outside=outside)
        if user != self._user:
            text = f"this keeper belongs to user {self._user}, not to user {user}"
            answer = {"kind": "failed", "errno": errno.EACCES, "error": text, "path": None}
            channel.send(answer, outside.now() + _REFUSAL_SECONDS)
            raise PermissionError(errno.EACCES, text)
        return channel

    def close(self) -> None:
        """Remove the socket, and the folders that are then empty; a failure is logged."""
        try:
            self._place.remove(self._rank, self._number)
        except OSError as error:
            logger.warning("the socket of rank %d's keeper stays until the next run: %s", self._rank, error)


class PeerEntrance(Entrance):
    """A TCP port, for those who know the secret of the run.

    Args:
        address: an address of this host, or a name of one
        secret: of the run
        outside: of this process

    Attributes:
        address, secret: see above
        port: known when it is open
    """

    def __init__(self, address: str, secret: str, outside: Outside = OUTSIDE) -> None:
        self.address = address
        self.port = 0
        self.secret = secret
        self._outside = outside

    def open(self) -> Socket:
        """Listen on a free port."""
        listener = listen_to_peers(self.address, self._outside)
        self.port = listener.getsockname()[1]
        return listener

    def admit(self, sock: Socket) -> Channel:
        """Let a client in that proves that it knows the secret; see the base class."""
        return greet_peer(sock, self.secret, self._outside)

    def close(self) -> None:
        """There is nothing that stays."""
