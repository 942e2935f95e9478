"""Frames over a socket between two processes: one JSON header, bytes, and file descriptors.

The frames are JSON and raw bytes, not pickle, so neither side can make the other run code. A side that is gone is
noticed at once by the closed socket, or by a poll if a forked process keeps the socket open. Between hosts frames are
signed, so that one which was damaged, or is not from the other side, is refused in words. What follows a frame as raw
bytes by agreement is not signed; who receives it compares checksums.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..outside import OUTSIDE, Outside, Socket

_HEAD = struct.Struct("<QQ")
_SIGNATURE_BYTES = 32
_CHUNK, _SIGNED_CHUNK = 1 << 20, 4 << 20
_POLL_SECONDS = 0.5
#: The longest timeout of a socket, which counts milliseconds in an int.
_LONGEST_SECONDS = 1e6

#: Bytes, or views of bytes, which arrive as one.
Blobs = Sequence[bytes | memoryview]
#: Header, bytes, and file descriptors, which the receiver owns.
Frame = tuple[dict[str, Any], memoryview, list[int]]


class FrameSignatures:
    """Signs the frames of one connection, each with its number, so that none is left out or repeated.

    Args:
        keys: for what is sent, and for what is received
        other: who is at the other end, for errors
    """

    def __init__(self, keys: tuple[bytes, bytes], other: str) -> None:
        self._keys = keys
        self._other = other
        self._numbers = [0, 0]

    def sign_next(self) -> Callable[..., bytes]:
        """What signs parts of the next frame that is sent."""
        return self._next(0)

    def check_next(self) -> Callable[..., None]:
        """What compares a signature with that of parts of the next frame that comes.

        It raises ConnectionAbortedError if they are not the same: a part was damaged, or comes from another process.
        """
        sign = self._next(1)

        def check(signature: bytes | bytearray | memoryview, *parts: bytes | memoryview) -> None:
            if not hmac.compare_digest(signature, sign(*parts)):
                text = f"what {self._other} sent was damaged on its way, or somebody else has sent it"
                raise ConnectionAbortedError(errno.ECONNABORTED, text)

        return check

    def _next(self, side: int) -> Callable[..., bytes]:
        key, number = self._keys[side], self._numbers[side]
        self._numbers[side] += 1

        def sign(*parts: bytes | memoryview) -> bytes:
            state = hmac.new(key, number.to_bytes(8, "little"), "sha256")
            for part in parts:
                state.update(part)
            return state.digest()

        return sign


class Channel:
    """A connection by frames to another process. One thread may receive while others send.

    Args:
        sock: connected to it; owned
        is_alive: whether the other process runs. Shows a death that the socket hides, because another process, forked
            while the connection was open, keeps its end.
        patience: seconds that each part of a frame may take once it has begun to arrive, even beyond a deadline
        outside: of this process
        signatures: sign the frames, which pass no descriptors; the socket is then prepared by `Sockets.watch_host`,
            with this patience

    Attributes:
        outside: see above
    """

    def __init__(
        self,
        sock: Socket,
        is_alive: Callable[[], bool],
        patience: float = 1.0,
        *,
        outside: Outside = OUTSIDE,
        signatures: FrameSignatures | None = None,
    ) -> None:
        self.outside = outside
        self._sock = sock
        self._is_alive = is_alive
        self._patience = patience
        self._signatures = signatures
        self._sending = outside.lock()

    def send(
        self, header: Mapping[str, Any], deadline: float = math.inf, blobs: Blobs = (), fds: Sequence[int] = ()
    ) -> None:
        """Send one frame.

        Args:
            header: plain values
            deadline: in seconds of `Outside.now`
            blobs: what follows the header
            fds: open file descriptors, of which copies are sent

        Raises:
            TimeoutError: the other process did not take it in time; the connection is then of no more use
            OSError: the other process has closed the connection
        """
        if fds and self._signatures is not None:
            raise ValueError("descriptors cannot be sent to another host")
        text = json.dumps(header, separators=(",", ":")).encode()
        head = _HEAD.pack(len(text), sum(map(len, blobs)))
        with self._sending:
            sign = None if self._signatures is None else self._signatures.sign_next()
            # `receive` waits by itself, and never meets this timeout.
            self._sock.settimeout(min(max(deadline - self.outside.now(), 0.001), _LONGEST_SECONDS))
            first = head if sign is None else head + sign(head)
            if fds:
                self.outside.send_descriptors(self._sock, first, fds)
                first = b""
            self._sock.sendall(first + text)
            for blob in blobs:
                self._sock.sendall(blob)
            if sign is not None:
                self._sock.sendall(sign(head, text, *blobs))

    def receive(self, deadline: float = math.inf) -> Frame | None:
        """Wait for the next frame; None if the other process has hung up or died.

        Args:
            deadline: when it must have arrived, in seconds of `Outside.now`; see `patience`

        Raises:
            TimeoutError: it has not
            ConnectionAbortedError: its signature is wrong
        """
        check = None if self._signatures is None else self._signatures.check_next()
        more = 0 if check is None else _SIGNATURE_BYTES
        try:
            if not self.await_input(deadline):
                return None
            data, fds = self.outside.receive_descriptors(self._sock, _HEAD.size + more)
            rest = bytearray(_HEAD.size + more - len(data))
            if not data or not self.receive_into(memoryview(rest), deadline):
                return None
            data += rest
            head = data[: _HEAD.size]
            if check is not None:
                check(data[_HEAD.size :], head)
            text_length, blob_length = _HEAD.unpack(head)
            body = bytearray(text_length + blob_length + more)
            if not self.receive_into(memoryview(body), deadline):
                return None
        except (TimeoutError, ConnectionAbortedError):
            raise
        except OSError:
            return None
        view = memoryview(body)
        content = view[: text_length + blob_length]
        if check is not None:
            check(view[content.nbytes :], head, content)
        return json.loads(bytes(content[:text_length])), content[text_length:], fds

    def receive_into(self, buffer: memoryview, deadline: float = math.inf) -> bool:
        """Receive the bytes that follow a frame by agreement.

        Args:
            buffer: to be filled
            deadline: when they must have arrived, in seconds of `Outside.now`; see `patience`

        Returns:
            False if the other process has hung up or died before the buffer was full.

        Raises:
            TimeoutError: they have not arrived
            OSError: the connection is broken
        """
        if self._signatures is not None:
            return self._fill(buffer, deadline)
        position = 0
        while position < buffer.nbytes:
            if not self.await_input(max(deadline, self.outside.now() + self._patience)):
                return False
            count = self._sock.recv_into(buffer[position : position + _CHUNK])
            if count == 0:
                return False
            position += count
        return True

    def _fill(self, buffer: memoryview, deadline: float) -> bool:
        """The same, from another host, whose end the socket itself notices: one call of the system fills much."""
        until, position = max(deadline, self.outside.now() + self._patience), 0
        while position < buffer.nbytes:
            if self.outside.now() > until:
                raise TimeoutError
            try:
                count = self.outside.fill(self._sock, buffer[position : position + _SIGNED_CHUNK])
            except BlockingIOError:
                raise TimeoutError from None
            if count == 0:
                return False
            position += count
        return True

    def send_bytes(self, data: memoryview, deadline: float = math.inf) -> None:
        """Send bytes to one that receives them by `receive_into`; raises as `send`. They may be changed then."""
        with self._sending:
            self._sock.settimeout(min(max(deadline - self.outside.now(), 0.001), _LONGEST_SECONDS))
            self._sock.sendall(data)

    def send_file(self, descriptor: int, offset: int, length: int, deadline: float = math.inf) -> int:
        """Send bytes of a file or memory to one that receives them by `receive_into`. No byte is copied here.

        Args:
            descriptor: where they are
            offset: of the first one
            length: how many; fewer are sent where the file ends earlier
            deadline: in seconds of `Outside.now`

        Returns:
            How many were sent.

        Raises:
            TimeoutError: the other process did not take them in time; the connection is then of no more use
            OSError: the other process has closed the connection, or the bytes cannot be read
        """
        sent, outside = 0, self.outside
        with self._sending:
            self._sock.settimeout(_LONGEST_SECONDS)  # so that no call waits
            while sent < length:
                if not outside.ready(self._sock, deadline - outside.now(), to_send=True):
                    raise TimeoutError
                try:
                    count = outside.send_file(self._sock, descriptor, offset + sent, length - sent)
                except BlockingIOError:
                    continue
                if count == 0:
                    break
                sent += count
        return sent

    def has_input_within(self, seconds: float) -> bool:
        """Wait at most so long; returns whether something has arrived, or the other process has ended."""
        try:
            self.await_input(self.outside.now() + seconds)
        except TimeoutError:
            return False
        return True

    def await_input(self, deadline: float) -> bool:
        """Wait until the other process has sent something or hung up; False: it has died.

        Raises:
            TimeoutError: it has done neither by the deadline, in seconds of `Outside.now`
        """
        while True:
            alive, remaining = self._is_alive(), deadline - self.outside.now()  # before a last look
            if self.outside.ready(self._sock, min(remaining, _POLL_SECONDS if alive else 0)):
                return True
            if not alive:
                return False
            if remaining <= 0:
                raise TimeoutError

    @property
    def hung_up(self) -> bool:
        """Whether the connection is closed, here or by the other process. Asked from any thread."""
        return self.outside.has_hung_up(self._sock)

    def hang_up(self, *, listens: bool = True) -> None:
        """Tell the other process that nothing more will come. Does not wait. Safe to call twice, and from any thread.

        This reaches it although a forked process, such as a worker of a DataLoader, has the connection open too.

        Args:
            listens: whether answers are still received. If not, a `receive` that waits returns.
        """
        with contextlib.suppress(OSError):  # it has ended
            self.outside.hang_up(self._sock, listens=listens)

    def close(self) -> None:
        """Hang up, and close the descriptor, which no other thread may be using. Safe to call twice."""
        self.hang_up(listens=False)
        self._sock.close()
