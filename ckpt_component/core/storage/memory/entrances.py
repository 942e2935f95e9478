"""Where clients of a keeper come in: its socket on this host, or a TCP port; and who may."""

from __future__ import annotations

import errno
import os
import socket
import time
from abc import ABC, abstractmethod
from functools import partial

from ...processes.framing import Channel
from .keeper_sockets import SocketPlace, peer_of
from .peer_sockets import greet_peer, listen_to_peers

_REFUSAL_SECONDS = 10.0


class Entrance(ABC):
    """A way to a keeper. Opened once."""

    @abstractmethod
    def open(self) -> socket.socket:
        """Listen; returns what listens, owned by the caller. Raises OSError."""

    @abstractmethod
    def admit(self, sock: socket.socket) -> Channel:
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

    def open(self) -> socket.socket:
        """Listen, in the place of a predecessor; raises as `SocketPlace.listen`."""
        listener, self._number = self._place.listen(self._rank)
        return listener

    def admit(self, sock: socket.socket) -> Channel:
        """Let a process of the user in; see the base class."""
        user, pid = peer_of(sock)
        channel = Channel(sock, partial(_may_live, pid))
        if user != self._user:
            text = f"this keeper belongs to user {self._user}, not to user {user}"
            answer = {"kind": "failed", "errno": errno.EACCES, "error": text, "path": None}
            channel.send(answer, time.monotonic() + _REFUSAL_SECONDS)
            raise PermissionError(errno.EACCES, text)
        return channel

    def close(self) -> None:
        """Remove the socket, and the folders that are then empty."""
        self._place.remove(self._rank, self._number)


class PeerEntrance(Entrance):
    """A TCP port, for those who know the secret of the run.

    Args:
        address: an address of this host, or a name of one
        secret: of the run

    Attributes:
        address, secret: see above
        port: known when it is open
    """

    def __init__(self, address: str, secret: str) -> None:
        self.address = address
        self.port = 0
        self.secret = secret

    def open(self) -> socket.socket:
        """Listen on a free port."""
        listener = listen_to_peers(self.address)
        self.port = listener.getsockname()[1]
        return listener

    def admit(self, sock: socket.socket) -> Channel:
        """Let a client in that proves that it knows the secret; see the base class."""
        return greet_peer(sock, self.secret)

    def close(self) -> None:
        """There is nothing that stays."""


def _may_live(pid: int) -> bool:
    """Whether a client's process lives. Its connection may outlive it, in a process that it forked."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's, which is refused
    return True
