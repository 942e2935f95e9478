"""Frames over a socket between the trainer and its byte writer: one JSON header, bytes, and file descriptors.

The frames are JSON and raw bytes, not pickle, so neither side can make the other run code. Standard library only.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEAD = struct.Struct("<QQ")
_MAX_FDS = 4
_CHUNK = 1 << 20

#: Header, bytes, and file descriptors, which the receiver owns.
Frame = tuple[dict[str, Any], memoryview, list[int]]


def send_frame(
    sock: socket.socket, header: dict[str, Any], blobs: Sequence[bytes | memoryview] = (), fds: Sequence[int] = ()
) -> None:
    """Send a header, the concatenated `blobs` (views of bytes), and copies of open file descriptors.

    The socket's timeout bounds each wait. Raises OSError if the other side has closed the connection.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    head = _HEAD.pack(len(text), sum(map(len, blobs)))
    if fds:
        socket.send_fds(sock, [head], list(fds))
        head = b""
    sock.sendall(head + text)
    for blob in blobs:
        sock.sendall(blob)


def receive_frame(sock: socket.socket) -> Frame | None:
    """Receive the next frame as (header, bytes, file descriptors); None if the other side has closed the connection."""
    data, fds, _, _ = socket.recv_fds(sock, _HEAD.size, _MAX_FDS)
    rest = _receive(sock, _HEAD.size - len(data))
    if not data or rest is None:
        return None
    text_length, blob_length = _HEAD.unpack(data + rest)
    body = _receive(sock, text_length + blob_length)
    if body is None:
        return None
    view = memoryview(body)
    return json.loads(bytes(view[:text_length])), view[text_length:], list(fds)


def _receive(sock: socket.socket, length: int) -> bytearray | None:
    buffer = bytearray(length)
    view = memoryview(buffer)
    position = 0
    while position < length:
        count = sock.recv_into(view[position : position + _CHUNK])
        if count == 0:
            return None
        position += count
    return buffer
