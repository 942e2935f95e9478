"""`HostMemory`: the memory of a run's keepers on this host as a storage of objects.

Checkpoints are committed, found and read in it as in a bucket. A file is in one keeper: that of the rank
that put it. What is listed is the union of all keepers.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...outside import OUTSIDE, Outside
from ..object_folders import ObjectFolders
from .keeper_sockets import SCHEME, VARIABLE
from .keeper_union import KeeperUnion
from .keepers import Keeper
from .remote_keeper import HostKeepers

if TYPE_CHECKING:
    from .memory_files import MemoryFiles

logger = logging.getLogger("ckpt_component.storage")


@dataclass
class _OpenFile:
    """A small file that is being written.

    Attributes:
        path: its path
        data: its bytes so far
        is_put: whether the keeper has it
    """

    path: str
    data: bytearray
    is_put: bool = False


class HostMemory(KeeperUnion, ObjectFolders):
    """See the top of this file. Thread-safe.

    Args:
        find: finds the keepers of the run to whose memory a path belongs; None: by their sockets on this host
        own: keeps what is put here, whether or not `find` finds it, too; None: this storage is read only (EROFS)
        outside: of this process
    """

    verifies_first = True
    shows_late = False
    common = f"folder {VARIABLE} on each host, in all its containers"

    def __init__(
        self,
        find: Callable[[str], Sequence[Keeper]] | None = None,
        own: Keeper | None = None,
        outside: Outside = OUTSIDE,
    ) -> None:
        super().__init__(durable=False, atomic_rename=False, warns=False)
        self.outside = outside
        self._find = HostKeepers(outside=outside) if find is None else find
        self._own = own
        self._numbers = itertools.count(1)
        self._lock = outside.lock()
        self._written: dict[int, _OpenFile] = {}

    def holds(self, path: str) -> bool:
        return path.startswith(SCHEME)

    # Large files: none comes this way, as an image is put by its keeper

    def create(self, path: str, size: int = 0) -> int:
        self._refuse_taken(path)
        fd = next(self._numbers)
        with self._lock:
            self._written[fd] = _OpenFile(path, bytearray())
        return fd

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        with self._lock:
            data = self._written[fd].data
            for piece in buffers:
                data.extend(bytes(max(offset - len(data), 0)))
                data[offset : offset + piece.nbytes] = piece
                offset += piece.nbytes

    def sync(self, fd: int) -> None:
        file = self._written[fd]
        self._writable(file.path).put(file.path, bytes(file.data), new=not file.is_put)
        file.is_put = True

    def close(self, fd: int) -> None:
        with self._lock:
            file = self._written.pop(fd)
        if not (file.is_put or file.data):  # an empty one is whole
            self._writable(file.path).put(file.path, b"")

    def open_files(self, folder: str, *, shared: bool = True) -> MemoryFiles:
        from .memory_files import MemoryFiles  # processes that only write do not load it

        return MemoryFiles(folder, partial(self._keepers, folder), self.outside)

    # Small files

    def write_new(self, path: str, data: bytes) -> None:
        self.put_new(path, data, "")

    def write_over(self, path: str, data: bytes) -> None:
        own = self._writable(path)
        has_it = (keeper for keeper, files in self._answers(path, lambda each: each.listed(path)) if files)
        next(has_it, own).put(path, data, new=False)

    def put_new(self, path: str, data: bytes, draft: str) -> None:
        self._refuse_taken(path)
        self._writable(path).put(path, data)

    def unlink(self, path: str) -> None:
        """See `Storage`. If a keeper does not answer, which is an error, what the own one had is gone nevertheless."""
        self._writable(path)
        if not any([was_there for _, was_there in self._answers(path, lambda keeper: _taken(keeper, path))]):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    # Properties of a folder

    def try_folder(self, path: str, name: str) -> float:
        if self._own is None:  # the keepers are on this host, and so is their clock
            return self.outside.date()
        trial = os.path.join(path, name)
        self.write_new(trial, b"")
        try:
            return self.modified(trial)
        finally:
            self.unlink(trial)

    def in_memory(self, path: str) -> bool:
        return True

    def _keepers(self, path: str) -> list[Keeper]:
        """All keepers that may have a path, the own one first."""
        own = [] if self._own is None else [self._own]
        return [*own, *self._find(path)]

    def _pass_over(self, keeper: Keeper, error: ConnectionError) -> None:
        if keeper is self._own:
            raise error
        logger.info("passed over what a keeper had: %s", error)

    def _delete(self, path: str, paths: Sequence[str]) -> None:
        self._writable(path)
        super()._delete(path, paths)

    def _refuse_taken(self, path: str) -> None:
        """Raise FileExistsError if another keeper has a path; the own one looks when it takes the file."""
        self._writable(path)
        if self.size(path) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def _writable(self, path: str) -> Keeper:
        """The keeper that takes what is put."""
        if self._own is None:
            raise OSError(errno.EROFS, "what is in memory is changed by the process that keeps it alone", path)
        return self._own


def _taken(keeper: Keeper, path: str) -> bool:
    """Delete a file from a keeper; returns whether it was there."""
    was_there = any(file.path == path for file in keeper.listed(path))
    if was_there:
        keeper.delete([path])
    return was_there
