"""A stream over a file of a `FileSet` that has no descriptor of its own, for formats that are read in no order."""

from __future__ import annotations

import errno
import io
from typing import Any

from .file_set import FileSet


class FileStream(io.RawIOBase):
    """Reads a file from any position.

    Args:
        files: the set that it belongs to, which outlives the stream
        name: its name there
        size: its size in bytes
    """

    def __init__(self, files: FileSet, name: str, size: int) -> None:
        self._files = files
        self._name = name
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position, as streams do."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if self._position < 0:
            raise OSError(errno.EINVAL, "a position before the beginning")
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer as far as the file goes; returns how many bytes."""
        count = max(min(len(buffer), self._size - self._position), 0)
        if not self._files.fill(self._name, memoryview(buffer)[:count], self._position):
            raise OSError(errno.EIO, "the file has become shorter", self._name)
        self._position += count
        return count
