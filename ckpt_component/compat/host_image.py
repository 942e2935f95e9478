"""Memory that the trainer fills and another process of the same machine writes from, without a copy in between.

A memfd has no name that could be left behind, and no place on the disk. The other process opens it by its place in
`/proc` of the process that holds it, so a pickled reference is a few bytes however large the memory is. Standard
library alone.
"""

from __future__ import annotations

import os
import pickle
import queue
import struct
import weakref
from typing import Any

from ..errors import CheckpointSaveError
from ..memory.huge_pages import map_shared

_LENGTH = struct.Struct("<Q")


class SharedFile:
    """An anonymous file in memory. Unpickled in another process it is the same file, not a copy.

    Args:
        fd: of a memfd; closed when this object is collected. Another process must unpickle it before that.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)

    def __reduce__(self) -> tuple[Any, ...]:
        # Numbers of descriptors are used again, numbers of memfds are not.
        return open_of, (os.getpid(), self.fd, os.fstat(self.fd).st_ino)


def open_of(pid: int, fd: int, number: int) -> SharedFile:
    """Open a file in memory by its place in a process that holds it.

    Args:
        pid: of that process.
        fd: its descriptor there.
        number: of the file's inode.

    Raises:
        CheckpointSaveError: the process has died, or has closed the file.
    """
    try:
        file = SharedFile(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise CheckpointSaveError(
            f"The snapshot in the memory of process {pid} cannot be opened ({error.strerror}): that process has "
            "ended or has given the save up, or this one may not look at it.",
            error.errno,
        ) from error
    if os.fstat(file.fd).st_ino != number:
        raise CheckpointSaveError(f"Process {pid} has given up the save whose snapshot was to be written.")
    return file


class HostImage:
    """The bytes of a rank's files, as one block.

    Args:
        file: the memfd that holds them.
        nbytes: its size; must not be 0.
        memory: the file's, where it is mapped already.
    """

    def __init__(self, file: SharedFile, nbytes: int, memory: memoryview | None = None) -> None:
        self._file = file
        self._nbytes = nbytes
        self.memory = map_shared(file.fd, nbytes) if memory is None else memory

    def __reduce__(self) -> tuple[Any, ...]:
        return HostImage, (self._file, self._nbytes)


class ResultMailbox:
    """Where a save's one result comes back, from whichever process wrote it. It belongs to one save alone.

    `put` and `get_nowait` are those of a queue, so that any queue can take its place.
    """

    def __init__(self) -> None:
        self._file = SharedFile(os.memfd_create("ckpt-result", os.MFD_CLOEXEC))

    def put(self, result: Any) -> None:
        """Leave the result; a second one takes the place of the first."""
        data = pickle.dumps(result)
        with open(self._file.fd, "r+b", closefd=False) as stream:
            stream.seek(0)
            stream.write(_LENGTH.pack(0) + data)
            stream.flush()
            stream.seek(0)
            stream.write(_LENGTH.pack(len(data)))  # last, so that a writer that is killed here has left nothing

    def get_nowait(self) -> Any:
        """The result.

        Raises:
            queue.Empty: there is none yet.
        """
        with open(self._file.fd, "rb", closefd=False) as stream:  # this process and its own children alone write it
            stream.seek(0)
            head = stream.read(_LENGTH.size)
            if not any(head):
                raise queue.Empty
            return pickle.loads(stream.read(*_LENGTH.unpack(head)))
