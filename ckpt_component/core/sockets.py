"""Connections between processes, as one part of the `Outside`, which says what they promise. Imports no torch."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

#: Where one listens: the path of a socket on this host; or of TCP, an address and a port.
Address = str | tuple[str, int]
#: Of one message; Linux passes at most 253 at once.
_MOST_DESCRIPTORS = 128
#: Connections that wait for one who is busy.
_BACKLOG = 128
_PAUSE_SECONDS = 0.02
_CREDENTIALS = struct.Struct("3i")
#: Seconds and microseconds, as the kernel has them.
_TIME = struct.Struct("@ll")
#: A host that is gone is noticed: seconds until it is asked for a sign of life, between such questions, and how many.
_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
#: Milliseconds that it may leave what was sent unconfirmed.
_UNCONFIRMED_MS = 30_000
#: Nothing is sent to it.
_ANY_PORT = 9
#: The longest timeout of a socket, which counts milliseconds in an int.
_LONGEST_SECONDS = 1e6


class Socket(Protocol):
    """One end of a connection, or what listens: methods of a `socket.socket`, which raise OSError as theirs do."""

    def settimeout(self, value: float | None, /) -> None:
        """Let each call take so many seconds from now on, and then raise TimeoutError; None: any time."""
        ...

    def gettimeout(self) -> float | None:
        """What was set."""
        ...

    def sendall(self, data: Any, /) -> None:
        """Send bytes."""
        ...

    def recv(self, bufsize: int, /) -> bytes:
        """What came, at most so many bytes; waits for some. Empty: nothing more will come."""
        ...

    def recv_into(self, buffer: Any, /) -> int:
        """Put what came into a buffer; waits for some. Returns how much; 0: nothing more will come."""
        ...

    def accept(self) -> tuple[Any, Any]:
        """A connection to who has connected, and where from; waits for one. OSError: it was shut down."""
        ...

    def shutdown(self, how: int, /) -> None:
        """See `Outside.hang_up`."""
        ...

    def close(self) -> None:
        """Give this end back. Safe to call twice."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> Any: ...

    def fileno(self) -> int:
        """Its descriptor, to be passed on; -1: it is closed."""
        ...

    def getsockname(self) -> Any:
        """Where it is."""
        ...

    def getpeername(self) -> Any:
        """Where the other end is."""
        ...


class Sockets:
    """The real ones."""

    now: Callable[[], float]
    sleep: Callable[[float], None]

    def pair(self) -> tuple[Socket, Socket]:
        """Two ends of a new connection within this host."""
        return socket.socketpair()

    def listen(self, address: Address) -> Socket:
        """Let others connect.

        Args:
            address: a path, which must be free, where a file for it is made that may be renamed and deleted; or an
                address of this host, and a port, 0 for a free one

        Raises:
            OSError: it cannot be made there
        """
        if isinstance(address, str):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(address)
                listener.listen(_BACKLOG)
            except BaseException:
                listener.close()
                raise
            return listener
        host, port = address
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((str(place[0]), port), family=family, backlog=_BACKLOG)

    def connect(self, address: Address, seconds: float) -> Socket:
        """Connect to one who listens.

        Args:
            address: see `listen`; of TCP, also the name of another host
            seconds: how long it may take; the timeout of the socket, too, until another one is set

        Raises:
            FileNotFoundError: there is nothing at the path
            ConnectionRefusedError: nobody listens there any more
            TimeoutError: so many connections wait that it must have been stopped, or the host does not answer
            OSError: the host cannot be reached
        """
        if not isinstance(address, str):
            return socket.create_connection(address, seconds)
        until = self.now() + seconds
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(seconds)
            while True:
                try:
                    sock.connect(address)
                    return sock
                except BlockingIOError as error:  # as many connections wait as may
                    if self.now() > until:
                        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), address) from error
                self.sleep(_PAUSE_SECONDS)
        except BaseException:
            sock.close()
            raise

    def adopt(self, descriptor: int) -> Socket:
        """The socket of a descriptor that was received or inherited; closing it closes that."""
        return socket.socket(fileno=descriptor)

    def address_towards(self, host: str) -> str:
        """The address of this host by which another one would be reached, which is asked nothing.

        Args:
            host: name or address of the other host

        Raises:
            OSError: the name has no address, or there is no way to it
        """
        (family, _, _, _, place), *_ = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(place)
            return str(sock.getsockname()[0])

    def credentials(self, sock: Socket) -> tuple[int, int]:
        """User and process ID of who is at the other end of a connection by path; ID 0: it is not seen from here."""
        data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)  # type: ignore[attr-defined]
        pid, user, _ = _CREDENTIALS.unpack(data)
        return user, pid

    def watch_host(self, sock: Socket, patience: float) -> None:
        """Prepare a connection to another host: what is sent goes at once, and a host that is gone is noticed.

        Args:
            sock: not used yet
            patience: seconds that `fill` waits for more
        """
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            *((socket.IPPROTO_TCP, *setting) for setting in (*_ALIVE, (socket.TCP_USER_TIMEOUT, _UNCONFIRMED_MS))),
            (socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(int(patience), 0)),
        ):
            sock.setsockopt(level, option, value)  # type: ignore[attr-defined]

    def ready(self, sock: Socket, seconds: float, *, to_send: bool = False) -> bool:
        """Wait until a socket has something, at most so many seconds; returns whether it has. Several threads may.

        That is what came, a connection to accept, the end of the connection, or with `to_send` room for what is sent.
        """
        descriptor = sock.fileno()
        if descriptor < 0:
            return True  # as a call will say at once
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT if to_send else select.POLLIN)
        return bool(poll.poll(max(min(seconds, _LONGEST_SECONDS), 0) * 1000))

    def has_hung_up(self, sock: Socket) -> bool:
        """Whether a connection has ended, in both directions, here or at the other end. Does not wait."""
        descriptor = sock.fileno()
        if descriptor < 0:
            return True
        poll = select.poll()
        poll.register(descriptor, 0)  # what is reported unasked: the end of the connection
        return bool(poll.poll(0))

    def hang_up(self, sock: Socket, *, listens: bool = True) -> None:
        """Say that nothing more will come, whoever else has this end, too. Wakes who waits in `accept`.

        Args:
            sock: the connection, or what listens
            listens: whether what the other side sends is still received; if not, who waits for it is woken

        Raises:
            OSError: it has ended
        """
        sock.shutdown(socket.SHUT_WR if listens else socket.SHUT_RDWR)

    def send_descriptors(self, sock: Socket, data: bytes, descriptors: Sequence[int]) -> None:
        """Send a few bytes, and copies of descriptors of files or sockets, as many as one message takes."""
        socket.send_fds(sock, [data], list(descriptors))  # type: ignore[arg-type]

    def receive_descriptors(self, sock: Socket, count: int) -> tuple[bytes, list[int]]:
        """As `recv`, and also the descriptors that came with these bytes, which belong to the caller."""
        data, descriptors, _, _ = socket.recv_fds(sock, count, _MOST_DESCRIPTORS)  # type: ignore[arg-type]
        return data, list(descriptors)

    def send_file(self, sock: Socket, descriptor: int, offset: int, count: int) -> int:
        """Send bytes of a file or memory, as many as there is room for now; no byte is copied here.

        Returns:
            How many; 0: the file ends there.

        Raises:
            BlockingIOError: there is no room now; only if the socket has a timeout
            OSError: the connection has ended, or the bytes cannot be read
        """
        return os.sendfile(sock.fileno(), descriptor, offset, count)

    def fill(self, sock: Socket, buffer: memoryview) -> int:
        """Receive as much as a buffer has room for, by one call of the system: fast, where much comes.

        Returns:
            How much; less: nothing more came for the patience of `watch_host`, or will come.

        Raises:
            BlockingIOError: nothing came for so long
            OSError: the connection has ended
        """
        if sock.gettimeout() is not None:
            sock.settimeout(None)  # that of the kernel counts
        return sock.recv_into(buffer, buffer.nbytes, socket.MSG_WAITALL)  # type: ignore[call-arg]
