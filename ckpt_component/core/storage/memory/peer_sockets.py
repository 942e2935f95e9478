"""Connections to keepers on other hosts: plain TCP, where both sides prove that they know the secret of the run.

Each side sends a challenge and answers the other's with an HMAC of both. From both challenges follow the keys that sign
all frames, so that a frame which was damaged, or is not from the other side, is refused in words. What follows a frame
as raw bytes is not signed; who receives it compares checksums. Nothing is encrypted.
"""

from __future__ import annotations

import errno
import hmac
import json
import math
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...processes.framing import LONGEST_SECONDS, Blobs, Channel, Frame

#: What a keeper says first; the number is that of the protocol.
_HELLO = b"ckpt keeper 1\n"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HANDSHAKE_SECONDS = 10.0
_HEAD = struct.Struct("<QQ")
#: Seconds and microseconds, as the kernel has them.
_TIME = struct.Struct("@ll")
_CHUNK = 4 << 20
#: How long the parts of a frame, or of the bytes that follow it, may be on their way.
_PATIENCE = 10.0
#: A host that is gone is noticed: seconds until it is asked for a sign of life, between such questions, and how many.
_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
#: Milliseconds that it may leave what was sent unconfirmed.
_UNCONFIRMED_MS = 30_000
_BACKLOG = 128


class PeerAddress(NamedTuple):
    """Where a keeper is reached from other hosts; also as a list in JSON.

    Attributes:
        host: the name of its host
        address: an IP address or a name that other hosts resolve
        port: of TCP
        rank: whose keeper it is
    """

    host: str
    address: str
    port: int
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank}'s keeper on {self.host} ({self.address} port {self.port})"


class SignedChannel(Channel):
    """A connection whose frames are signed. It passes no descriptors.

    Args:
        sock: connected; owned
        keys: for what is sent, and for what is received
        other: who is at the other end, for errors
    """

    def __init__(self, sock: socket.socket, keys: tuple[bytes, bytes], other: str) -> None:
        super().__init__(sock, lambda: True, _PATIENCE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(int(_PATIENCE), 0))
        self._sending_key, self._receiving_key = keys
        self._other = other
        #: Frames so far, which are signed with their number so that none is left out or repeated.
        self._sent = self._received = 0

    def send(
        self, header: Mapping[str, Any], deadline: float = math.inf, blobs: Blobs = (), fds: Sequence[int] = ()
    ) -> None:
        """Send one frame; see the base class. `fds` must be empty."""
        if fds:
            raise ValueError("descriptors cannot be sent to another host")
        text = json.dumps(header, separators=(",", ":")).encode()
        head = _HEAD.pack(len(text), sum(map(len, blobs)))
        with self._sending:
            key, number = self._sending_key, self._sent
            self._sent += 1
            self._sock.settimeout(min(max(deadline - time.monotonic(), 0.001), LONGEST_SECONDS))
            self._sock.sendall(head + _signature(key, number, head) + text)
            for blob in blobs:
                self._sock.sendall(blob)
            self._sock.sendall(_signature(key, number, head, text, *blobs))

    def receive(self, deadline: float = math.inf) -> Frame | None:
        """Wait for the next frame; see the base class.

        Raises:
            TimeoutError: it has not arrived
            ConnectionAbortedError: it was damaged on its way, or comes from somebody else
        """
        key, number = self._receiving_key, self._received
        self._received += 1
        try:
            if not self.await_input(deadline):
                return None
            head = bytearray(_HEAD.size + _PROOF_BYTES)
            if not self.receive_into(memoryview(head), deadline):
                return None
            lengths = bytes(head[: _HEAD.size])
            self._check(head[_HEAD.size :], _signature(key, number, lengths))
            text_length, blob_length = _HEAD.unpack(lengths)
            body = bytearray(text_length + blob_length + _PROOF_BYTES)
            if not self.receive_into(memoryview(body), deadline):
                return None
        except (TimeoutError, ConnectionAbortedError):
            raise
        except OSError:
            return None
        view = memoryview(body)
        content = view[: text_length + blob_length]
        self._check(view[content.nbytes :], _signature(key, number, lengths, content))
        return json.loads(bytes(content[:text_length])), content[text_length:], []

    def receive_into(self, buffer: memoryview, deadline: float = math.inf) -> bool:
        """Receive the bytes that follow a frame; see the base class. Here one call of the system fills much at once."""
        until, position = max(deadline, time.monotonic() + _PATIENCE), 0
        self._sock.settimeout(None)  # that of the kernel counts
        while position < buffer.nbytes:
            if time.monotonic() > until:
                raise TimeoutError
            wanted = min(buffer.nbytes - position, _CHUNK)
            try:
                count = self._sock.recv_into(buffer[position:], wanted, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError from None
            if count == 0:
                return False
            position += count
        return True

    def _check(self, signature: bytearray | memoryview, right: bytes) -> None:
        if not hmac.compare_digest(signature, right):
            text = f"what {self._other} sent was damaged on its way, or somebody else has sent it"
            raise ConnectionAbortedError(errno.ECONNABORTED, text)


def connect_to_peer(to: PeerAddress, secret: str, seconds: float) -> SignedChannel:
    """Connect to a keeper on another host.

    Args:
        to: where it is
        secret: of its run
        seconds: how long it may take

    Raises:
        ConnectionError: there is no keeper, or it has hung up
        PermissionError: it belongs to another run, or is no keeper of this release
        TimeoutError: it does not answer
        OSError: the host is not reached
    """
    until = time.monotonic() + seconds
    try:
        sock = socket.create_connection((to.address, to.port), timeout=seconds)
    except TimeoutError as error:
        raise TimeoutError(errno.ETIMEDOUT, f"{to} cannot be reached in {seconds:g} s") from error
    except OSError as error:
        kind = type(error) if isinstance(error, ConnectionError) else ConnectionRefusedError
        raise kind(error.errno or errno.EHOSTUNREACH, f"{to} cannot be reached: {error.strerror or error}") from error
    try:
        _prepare(sock)
        theirs = _exactly(sock, len(_HELLO) + _NONCE_BYTES, until)
        if not theirs.startswith(_HELLO):
            raise PermissionError(errno.EACCES, f"{to} is no keeper, or one of another release of ckpt_component")
        challenges = theirs[len(_HELLO) :] + os.urandom(_NONCE_BYTES)
        sock.sendall(challenges[_NONCE_BYTES:] + _derived(secret, b"proof of client", challenges))
        proof = _exactly(sock, _PROOF_BYTES, until)
        if not hmac.compare_digest(proof, _derived(secret, b"proof of keeper", challenges)):
            raise PermissionError(errno.EACCES, f"{to} belongs to another run: the run's secret is not the same")
        return SignedChannel(sock, _keys(secret, challenges), str(to))
    except TimeoutError as error:
        sock.close()
        raise TimeoutError(errno.ETIMEDOUT, f"{to} has not answered for {seconds:g} s") from error
    except ConnectionError as error:
        sock.close()
        raise ConnectionResetError(errno.ECONNRESET, f"{to} has hung up") from error
    except BaseException:
        sock.close()
        raise


def greet_peer(sock: socket.socket, secret: str) -> SignedChannel:
    """Let a client in that knows the secret; the counterpart of `connect_to_peer`.

    Args:
        sock: connected to it; closed if this raises
        secret: of this keeper's run

    Raises:
        PermissionError: it does not know the secret
        OSError: it hung up, or is too slow
    """
    until = time.monotonic() + _HANDSHAKE_SECONDS
    try:
        _prepare(sock)
        other = "the client at {} port {}".format(*sock.getpeername()[:2])
        ours = os.urandom(_NONCE_BYTES)
        sock.settimeout(_HANDSHAKE_SECONDS)
        sock.sendall(_HELLO + ours)
        answer = _exactly(sock, _NONCE_BYTES + _PROOF_BYTES, until)
        challenges = ours + answer[:_NONCE_BYTES]
        if not hmac.compare_digest(answer[_NONCE_BYTES:], _derived(secret, b"proof of client", challenges)):
            sock.sendall(bytes(_PROOF_BYTES))  # which is wrong, so the other side says why it ends
            raise PermissionError(errno.EACCES, f"{other} does not know the secret of this run")
        sock.sendall(_derived(secret, b"proof of keeper", challenges))
        return SignedChannel(sock, _keys(secret, challenges)[::-1], other)
    except BaseException:
        sock.close()
        raise


def listen_to_peers(address: str) -> socket.socket:
    """Listen on a free port of an address of this host; raises OSError in words."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((str(place[0]), 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        why = error.strerror or error
        text = f"a keeper cannot listen on {address!r}, which is to be an address of this host: {why}"
        raise OSError(error.errno or errno.EADDRNOTAVAIL, text) from error


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*_ALIVE, (socket.TCP_USER_TIMEOUT, _UNCONFIRMED_MS)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _exactly(sock: socket.socket, count: int, until: float) -> bytes:
    data = b""
    while len(data) < count:
        sock.settimeout(max(until - time.monotonic(), 0.001))
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "it has hung up")
        data += part
    return data


def _keys(secret: str, challenges: bytes) -> tuple[bytes, bytes]:
    """The keys of a client: for what it sends, and for what it receives."""
    return _derived(secret, b"key of client", challenges), _derived(secret, b"key of keeper", challenges)


def _derived(secret: str, purpose: bytes, challenges: bytes) -> bytes:
    return hmac.digest(secret.encode(), purpose + challenges, "sha256")


def _signature(key: bytes, number: int, *parts: bytes | memoryview) -> bytes:
    state = hmac.new(key, number.to_bytes(8, "little"), "sha256")
    for part in parts:
        state.update(part)
    return state.digest()
