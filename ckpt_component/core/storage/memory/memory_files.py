"""`MemoryFiles`: the files of a folder of `HostMemory`, read from the memory that their keepers hold.

They are opened with the first file that is asked for; from then on the bytes that are on this host are there, even if a
keeper ends.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import IO

from ...outside import OUTSIDE, Outside
from ..file_set import FileSet, RangeRead
from ..file_stream import FileStream
from ..safe_open import read_failure
from .keepers import Keeper, Piece

logger = logging.getLogger("ckpt_component.storage")

_LEAST_THREADS, _MOST_THREADS = 2, 4
_STREAM_BYTES = 256 << 10


class MemoryFiles(FileSet):
    """The files of a folder.

    Args:
        folder: folder of the checkpoint
        find: returns the keepers that may have some of them; of two that have the same one, the one whose own it is
            counts, else the first
        outside: that of the storage
    """

    def __init__(self, folder: str, find: Callable[[], Sequence[Keeper]], outside: Outside = OUTSIDE) -> None:
        super().__init__(folder, outside)
        self._find = find
        self._lock = outside.lock()
        self._files: dict[str, Piece | bytes] | None = None
        self._until_closed = ExitStack()

    @property
    def seen_by_all(self) -> bool:
        """Whether all is in the memory of this host, where the ranks that wrote it have put it."""
        return all(isinstance(file, bytes) or (file.is_here and not file.is_replica) for file in self._all().values())

    def size(self, name: str) -> int:
        file = self._file(name)
        return len(file) if isinstance(file, bytes) else file.size

    def stream(self, name: str) -> IO[bytes]:
        return io.BufferedReader(FileStream(self, name, self.size(name)), _STREAM_BYTES)

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        file = self._file(name)
        if offset + buffer.nbytes > self.size(name):
            return False
        if isinstance(file, bytes):
            buffer[:] = memoryview(file)[offset : offset + buffer.nbytes]
            return True
        try:
            return file.fill(buffer, offset)
        except OSError as error:
            raise read_failure(os.path.join(self._folder, name), error) from error

    def view(self, name: str, offset: int, length: int) -> memoryview | None:
        """As for `FileSet`; memory that is mapped is not copied."""
        file = self._file(name)
        mapping = None if isinstance(file, bytes) else file.view(offset, length)
        return super().view(name, offset, length) if mapping is None else mapping

    def _file(self, name: str) -> Piece | bytes:
        path = self._path(name)
        try:
            files = self._all()
            if name not in files:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        except OSError as error:
            raise read_failure(path, error) from error
        return files[name]

    def _all(self) -> Mapping[str, Piece | bytes]:
        """The files, which are opened now if they are not."""
        with self._lock:
            if self._files is None:
                self._files = self._open()
            return self._files

    def _open(self) -> dict[str, Piece | bytes]:
        files = dict[str, Piece | bytes]()
        with ExitStack() as until_closed:
            for keeper in self._find():
                try:
                    found = until_closed.enter_context(keeper.opened(self._folder))
                except ConnectionError as error:  # its files are gone with it
                    logger.info("passed over what a keeper had: %s", error)
                    continue
                for name, file in found.items():
                    if name not in files or (_is_replica(files[name]) and not _is_replica(file)):
                        files[name] = file
            self._until_closed = until_closed.pop_all()
        return files

    def _forget(self, name: str, offset: int, length: int) -> None:
        file = self._file(name)
        if not isinstance(file, bytes):
            file.forget(offset, length)

    def _choose_ways(self, ordered: Sequence[RangeRead]) -> int:
        return min(max(os.cpu_count() or 1, _LEAST_THREADS), _MOST_THREADS, len(ordered))

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        with self._lock:
            self._files = None
            self._until_closed.close()


def _is_replica(file: Piece | bytes) -> bool:
    return isinstance(file, Piece) and file.is_replica
