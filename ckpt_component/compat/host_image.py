"""Memory that the trainer fills and another process on the same host writes from, without a further copy.

A memfd has no name that could be left behind and uses no disk. The other process opens it through `/proc` of the
process that holds it, so a pickled reference takes a few bytes regardless of the memory's size. Standard library only.
"""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core.outside import Empty
from ..core.pages import map_shared
from ..errors import CheckpointSaveError

#: The first byte of a mailbox that has a result.
_COMPLETE = b"\x01"


class SharedFile:
    """An anonymous file in memory. Unpickling it in another process opens the same file, not a copy.

    Args:
        fd: descriptor of a memfd; closed when this object is collected. Other processes must unpickle it before that.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)

    def __reduce__(self) -> tuple[Any, ...]:
        # Descriptor numbers are reused; inode numbers of memfds are not.
        return open_of, (os.getpid(), self.fd, os.fstat(self.fd).st_ino)


def open_of(pid: int, fd: int, number: int) -> SharedFile:
    """Open a memory file through `/proc` of a process that holds it.

    Args:
        pid: process ID of the holder
        fd: its descriptor of the file
        number: inode number of the file

    Raises:
        CheckpointSaveError: the process has died or closed the file
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
    """The bytes of a rank's files in one block.

    Args:
        file: the memfd with the bytes
        nbytes: its size; must not be 0
        memory: its mapping, if it is mapped already
    """

    def __init__(self, file: SharedFile, nbytes: int, memory: memoryview | None = None) -> None:
        self._file = file
        self._nbytes = nbytes
        self.memory = map_shared(file.fd, nbytes) if memory is None else memory

    def __reduce__(self) -> tuple[Any, ...]:
        return HostImage, (self._file, self._nbytes)


Place = tuple[int, int]


class ImageBucket(NamedTuple):
    """A file to write.

    Attributes:
        path: its path
        storage_key: its name in `.metadata`
        image: the rank's image, with the bytes of all its files
        start: where this file starts in the image
        end: where it ends there
        tail: bytes to append
        places: locations of the items, in the order of the bucket
    """

    path: str
    storage_key: str
    image: HostImage
    start: int
    end: int
    tail: bytes
    places: Sequence[Place]


class ResultMailbox:
    """Receives the result of one save from the process that wrote it.

    It has the methods `put` and `get_nowait` of a queue, so that any queue can replace it.
    """

    def __init__(self) -> None:
        self._file = SharedFile(os.memfd_create("ckpt-result", os.MFD_CLOEXEC))

    def put(self, result: Any) -> None:
        """Store the result; a second one replaces the first."""
        data = pickle.dumps(result)  # it ends with a mark, so a longer one before does no harm
        os.pwrite(self._file.fd, b"\x00" + data, 0)
        os.pwrite(self._file.fd, _COMPLETE, 0)  # last, so that a writer killed here leaves no result

    def get_nowait(self) -> Any:
        """Return the result.

        Raises:
            Empty: there is no result yet
        """
        fd = self._file.fd
        if os.pread(fd, 1, 0) != _COMPLETE:
            raise Empty
        return pickle.loads(os.pread(fd, os.fstat(fd).st_size, 1))  # only this process and its children write
