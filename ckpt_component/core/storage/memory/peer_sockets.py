"""Connections to keepers on other hosts: plain TCP, where both sides prove that they know the secret of the run.

Each side sends a challenge and answers the other's with an HMAC of both. From both challenges follow the keys that sign
all frames, so that a frame which was damaged, or is not from the other side, is refused in words. What follows a frame
as raw bytes is not signed; who receives it compares checksums. Nothing is encrypted.
"""

from __future__ import annotations

import errno
import hmac
from typing import NamedTuple

from ...outside import OUTSIDE, Outside, Socket
from ...processes.framing import Channel, FrameSignatures

#: What a keeper says first; the number is that of the protocol.
_HELLO = b"ckpt keeper 1\n"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HANDSHAKE_SECONDS = 10.0
#: How long the parts of a frame, or of the bytes that follow it, may be on their way.
_PATIENCE = 10.0


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


def connect_to_peer(to: PeerAddress, secret: str, seconds: float, outside: Outside = OUTSIDE) -> Channel:
    """Connect to a keeper on another host.

    Args:
        to: where it is
        secret: of its run
        seconds: how long it may take
        outside: of this process

    Returns:
        A connection whose frames are signed.

    Raises:
        ConnectionError: there is no keeper, or it has hung up
        PermissionError: it belongs to another run, or is no keeper of this release
        TimeoutError: it does not answer
        OSError: the host is not reached
    """
    until = outside.now() + seconds
    try:
        sock = outside.connect((to.address, to.port), seconds)
    except TimeoutError as error:
        raise TimeoutError(errno.ETIMEDOUT, f"{to} cannot be reached in {seconds:g} s") from error
    except OSError as error:
        kind = type(error) if isinstance(error, ConnectionError) else ConnectionRefusedError
        raise kind(error.errno or errno.EHOSTUNREACH, f"{to} cannot be reached: {error.strerror or error}") from error
    try:
        outside.watch_host(sock, _PATIENCE)
        theirs = _exactly(sock, len(_HELLO) + _NONCE_BYTES, until, outside)
        if not theirs.startswith(_HELLO):
            raise PermissionError(errno.EACCES, f"{to} is no keeper, or one of another release of ckpt_component")
        challenges = theirs[len(_HELLO) :] + outside.random_bytes(_NONCE_BYTES)
        sock.sendall(challenges[_NONCE_BYTES:] + _derived(secret, b"proof of client", challenges))
        proof = _exactly(sock, _PROOF_BYTES, until, outside)
        if not hmac.compare_digest(proof, _derived(secret, b"proof of keeper", challenges)):
            raise PermissionError(errno.EACCES, f"{to} belongs to another run: the run's secret is not the same")
        return _channel(sock, _keys(secret, challenges), str(to), outside)
    except TimeoutError as error:
        sock.close()
        raise TimeoutError(errno.ETIMEDOUT, f"{to} has not answered for {seconds:g} s") from error
    except ConnectionError as error:
        sock.close()
        raise ConnectionResetError(errno.ECONNRESET, f"{to} has hung up") from error
    except BaseException:
        sock.close()
        raise


def greet_peer(sock: Socket, secret: str, outside: Outside = OUTSIDE) -> Channel:
    """Let a client in that knows the secret; the counterpart of `connect_to_peer`.

    Args:
        sock: connected to it; closed if this raises
        secret: of this keeper's run
        outside: of this process

    Raises:
        PermissionError: it does not know the secret
        OSError: it hung up, or is too slow
    """
    until = outside.now() + _HANDSHAKE_SECONDS
    try:
        outside.watch_host(sock, _PATIENCE)
        other = "the client at {} port {}".format(*sock.getpeername()[:2])
        ours = outside.random_bytes(_NONCE_BYTES)
        sock.settimeout(_HANDSHAKE_SECONDS)
        sock.sendall(_HELLO + ours)
        answer = _exactly(sock, _NONCE_BYTES + _PROOF_BYTES, until, outside)
        challenges = ours + answer[:_NONCE_BYTES]
        if not hmac.compare_digest(answer[_NONCE_BYTES:], _derived(secret, b"proof of client", challenges)):
            sock.sendall(bytes(_PROOF_BYTES))  # which is wrong, so the other side says why it ends
            raise PermissionError(errno.EACCES, f"{other} does not know the secret of this run")
        sock.sendall(_derived(secret, b"proof of keeper", challenges))
        return _channel(sock, _keys(secret, challenges)[::-1], other, outside)
    except BaseException:
        sock.close()
        raise


def listen_to_peers(address: str, outside: Outside = OUTSIDE) -> Socket:
    """Listen on a free port of an address of this host; raises OSError in words."""
    try:
        return outside.listen((address, 0))
    except OSError as error:
        why = error.strerror or error
        text = f"a keeper cannot listen on {address!r}, which is to be an address of this host: {why}"
        raise OSError(error.errno or errno.EADDRNOTAVAIL, text) from error


def _channel(sock: Socket, keys: tuple[bytes, bytes], other: str, outside: Outside) -> Channel:
    return Channel(sock, lambda: True, _PATIENCE, outside=outside, signatures=FrameSignatures(keys, other))


def _exactly(sock: Socket, count: int, until: float, outside: Outside) -> bytes:
    data = b""
    while len(data) < count:
        sock.settimeout(max(until - outside.now(), 0.001))
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
