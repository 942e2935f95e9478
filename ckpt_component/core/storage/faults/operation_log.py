"""The log in which `FailpointFs` counts the operations of all processes of a test, as records of fixed length."""

from __future__ import annotations

import os
from dataclasses import dataclass

#: Length of every record, so that the position in the file gives a record's number.
RECORD_BYTES = 512


@dataclass(frozen=True)
class Operation:
    """One record of the log."""

    pid: int
    rank: str
    process: str
    operation: str
    path: str


def read_log(path: str) -> list[Operation]:
    """The operations of a log (or of `<log>.fired`), in order; none if there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    with os.fdopen(fd, "rb") as stream:
        data = stream.read()
    operations = []
    for start in range(0, len(data), RECORD_BYTES):
        text = data[start : start + RECORD_BYTES].decode(errors="replace").strip()
        pid, rank, process, operation, *file = text.split(" ", 4)
        operations.append(Operation(int(pid), rank, process, operation, "".join(file)))
    return operations


def record(pid: int, rank: str, process: str, operation: str, path: str) -> bytes:
    """Format one record, padded.

    Raises:
        ValueError: the path is too long for a record; paths are never truncated, so that they stay distinct
    """
    head = f"{pid} {rank} {process} {operation} ".encode()
    tail = os.fsencode(path).replace(b"\n", b"?")
    if len(head) + len(tail) >= RECORD_BYTES:
        raise ValueError(f"{path} does not fit into a record of {RECORD_BYTES} bytes; test in a shorter folder.")
    return (head + tail).ljust(RECORD_BYTES - 1) + b"\n"


def append(path: str, data: bytes) -> int:
    """Append one record and return its number, from 1. Opens the file each time, so it is safe in forks and threads."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data)
        # An appending write leaves the position at the end of its own data, even if others append.
        return os.lseek(fd, 0, os.SEEK_CUR) // len(data)
    finally:
        os.close(fd)
