"""Numbered messages over a `multiprocessing` connection, in pieces that never block for long.

To a process that is stopped, or dead with its pipe held open by a sibling, a send of a large message would never end.
So a message goes in pieces that fit the buffer of the pipe, and the sender checks on the process before each.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from multiprocessing.connection import Connection

_HEAD = struct.Struct("<qQ")
#: Less than what a Unix socket that polls as writable takes at once.
_PIECE_BYTES = 1 << 16

#: The number of the first message of a process: it is ready, or why it cannot start.
READY = -1
#: The number of the last message to a process.
END = -2
#: The number of the message that confirms a request: it has arrived whole, and is about to run.
TAKEN = -3


def send_message(
    connection: Connection,
    number: int,
    body: bytes | bytearray,
    before_piece: Callable[[], None] | None = None,
) -> None:
    """Send one message.

    Args:
        connection: one end of a duplex pipe.
        number: what the message belongs to.
        body: any number of bytes.
        before_piece: returns when the next piece can be sent without blocking, or raises.

    Raises:
        OSError: the other side has closed.
    """
    view = memoryview(body)
    if before_piece is not None:
        before_piece()
    connection.send_bytes(_HEAD.pack(number, view.nbytes))
    for start in range(0, view.nbytes, _PIECE_BYTES):
        if before_piece is not None:
            before_piece()
        connection.send_bytes(view[start : start + _PIECE_BYTES])


def receive_message(connection: Connection, before_piece: Callable[[], None] | None = None) -> tuple[int, bytearray]:
    """The next message as (number, body).

    Args:
        connection: one end of a duplex pipe.
        before_piece: returns when the next piece is there, or raises.

    Raises:
        EOFError, OSError: the other side has closed.
    """
    if before_piece is not None:
        before_piece()
    number, length = _HEAD.unpack(connection.recv_bytes())
    body = bytearray(length)
    position = 0
    while position < length:
        if before_piece is not None:
            before_piece()
        position += connection.recv_bytes_into(body, position)
    return number, body
