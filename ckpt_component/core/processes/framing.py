"""Frames over a socket between a process and its child: one JSON header, bytes, and file descriptors.

The frames are JSON and raw bytes, not pickle, so neither side can make the other run code. A side that is gone is
noticed at once by the closed socket, or by a poll if a forked process keeps the socket open. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_HEAD = struct.Struct("<QQ")
#: Of one frame; Linux passes at most 253 at once.
_MAX_FDS = 128
_CHUNK = 1 << 20
_POLL_SECONDS = 0.5
#: The longest timeout of a socket, which counts milliseconds in an int.
LONGEST_SECONDS = 1e6

#: Bytes, or views of bytes, which arrive as one.
Blobs = Sequence[bytes | memoryview]
#: Header, bytes, and file descriptors, which the receiver owns.
Frame = tuple[dict[str, Any], memoryview, list[int]]


class Channel:
    """A connection by frames to another process. One thread may receive while others send.

    Args:
        sock: connected to it; owned
        is_alive: whether the other process runs. Shows a death that the socket hides, because another process, forked
            while the connection was open, keeps its end.
        patience: seconds that each part of a frame may take once it has begun to arrive, even beyond a deadline
    """

    def __init__(self, sock: socket.socket, is_alive: Callable[[], bool], patience: float = 1.0) -> None:
        self._sock = sock
        self._is_alive = is_alive
        self._patience = patience
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._sending = threading.Lock()

    def send(
        self, header: Mapping[str, Any], deadline: float = math.inf, blobs: Blobs = (), fds: Sequence[int] = ()
    ) -> None:
        """Send one frame.

        Args:
            header: plain values
            deadline: monotonic seconds
            blobs: what follows the header
            fds: open file descriptors, of which copies are sent

        Raises:
            TimeoutError: the other process did not take it in time; the connection is then of no more use
            OSError: the other process has closed the connection
        """
        text = json.dumps(header, separators=(",", ":")).encode()
        head = _HEAD.pack(len(text), sum(map(len, blobs)))
        with self._sending:
            # `receive` waits by itself, and never meets this timeout.
            self._sock.settimeout(min(max(deadline - time.monotonic(), 0.001), LONGEST_SECONDS))
            if fds:
                socket.send_fds(self._sock, [head], list(fds))
                head = b""
            self._sock.sendall(head + text)
            for blob in blobs:
                self._sock.sendall(blob)

    def receive(self, deadline: float = math.inf) -> Frame | None:
        """Wait for the next frame; None if the other process has hung up or died.

        Args:
            deadline: when it must have arrived, monotonic seconds; see `patience`

        Raises:
            TimeoutError: it has not
        """
        try:
            if not self.await_input(deadline):
                return None
            data, fds, _, _ = socket.recv_fds(self._sock, _HEAD.size, _MAX_FDS)
            rest = bytearray(_HEAD.size - len(data))
            if not data or not self.receive_into(memoryview(rest), deadline):
                return None
            text_length, blob_length = _HEAD.unpack(data + rest)
            body = bytearray(text_length + blob_length)
            if not self.receive_into(memoryview(body), deadline):
                return None
        except TimeoutError:
            raise
        except OSError:
            return None
        view = memoryview(body)
        return json.loads(bytes(view[:text_length])), view[text_length:], list(fds)

    def receive_into(self, buffer: memoryview, deadline: float = math.inf) -> bool:
        """Receive the bytes that follow a frame by agreement.

        Args:
            buffer: to be filled
            deadline: when they must have arrived, monotonic seconds; see `patience`

        Returns:
            False if the other process has hung up or died before the buffer was full.

        Raises:
            TimeoutError: they have not arrived
            OSError: the connection is broken
        """
        position = 0
        while position < buffer.nbytes:
            if not self.await_input(max(deadline, time.monotonic() + self._patience)):
                return False
            count = self._sock.recv_into(buffer[position : position + _CHUNK])
            if count == 0:
                return False
            position += count
        return True

    def send_file(self, descriptor: int, offset: int, length: int, deadline: float = math.inf) -> int:
        """Send bytes of a file or memory to one that receives them by `receive_into`. No byte is copied here.

        Args:
            descriptor: where they are
            offset: of the first one
            length: how many; fewer are sent where the file ends earlier
            deadline: monotonic seconds

        Returns:
            How many were sent.

        Raises:
            TimeoutError: the other process did not take them in time; the connection is then of no more use
            OSError: the other process has closed the connection, or the bytes cannot be read
        """
        sent, poll = 0, select.poll()
        poll.register(self._sock, select.POLLOUT)
        with self._sending:
            self._sock.settimeout(LONGEST_SECONDS)  # so that no call waits
            while sent < length:
                if not poll.poll(max(min(deadline - time.monotonic(), LONGEST_SECONDS), 0) * 1000):
                    raise TimeoutError
                try:
                    count = os.sendfile(self._sock.fileno(), descriptor, offset + sent, length - sent)
                except BlockingIOError:
                    continue
                if count == 0:
                    break
                sent += count
        return sent

    @property
    def has_input(self) -> bool:
        """Whether something has arrived, or the other process has hung up."""
        return bool(self._poll.poll(0))

    def await_input(self, deadline: float) -> bool:
        """Wait until the other process has sent something or hung up; False: it has died.

        Raises:
            TimeoutError: it has done neither by the deadline, in monotonic seconds
        """
        while True:
            alive, remaining = self._is_alive(), deadline - time.monotonic()  # before a last look
            if self._poll.poll(max(min(remaining, _POLL_SECONDS if alive else 0), 0) * 1000):
                return True
            if not alive:
                return False
            if remaining <= 0:
                raise TimeoutError

    @property
    def hung_up(self) -> bool:
        """Whether the connection is closed, here or by the other process. Asked from any thread."""
        fd = self._sock.fileno()
        if fd < 0:
            return True
        poll = select.poll()  # its own, as a thread may be waiting in `receive`
        poll.register(fd, 0)  # what is reported unasked: the end of the connection
        return bool(poll.poll(0))

    def hang_up(self, *, listens: bool = True) -> None:
        """Tell the other process that nothing more will come. Does not wait. Safe to call twice, and from any thread.

        This reaches it although a forked process, such as a worker of a DataLoader, has the connection open too.

        Args:
            listens: whether answers are still received. If not, a `receive` that waits returns.
        """
        with contextlib.suppress(OSError):  # it has ended
            self._sock.shutdown(socket.SHUT_WR if listens else socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and close the descriptor, which no other thread may be using. Safe to call twice."""
        self.hang_up(listens=False)
        self._sock.close()
