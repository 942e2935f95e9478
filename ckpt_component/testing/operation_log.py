"""The log in which `FailpointFs` counts the operations of all processes of a test: records of one length, appended."""

from __future__ import annotations

import os
from dataclasses import dataclass

#: Every record has this length, so that its place is its number.
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
    """The operations of a log (or of `<log>.fired`), in order; none when there is no such file."""
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
    """One record, padded.

    Raises:
        ValueError: the path is too long for a record; cut, it would be another one for each operation.
    """
    head = f"{pid} {rank} {process} {operation} ".encode()
    tail = os.fsencode(path).replace(b"\n", b"?")
    if len(head) + len(tail) >= RECORD_BYTES:
        raise ValueError(f"{path} does not fit into a record of {RECORD_BYTES} bytes; test in a shorter folder.")
    return (head + tail).ljust(RECORD_BYTES - 1) + b"\n"


def append(path: str, data: bytes) -> int:
    """Append one record, and return its number from 1. Each call opens the file anew, so forks and threads may call."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data)
        # An appending write leaves the position behind its own data, also when others append.
        return os.lseek(fd, 0, os.SEEK_CUR) // len(data)
    finally:
        os.close(fd)
