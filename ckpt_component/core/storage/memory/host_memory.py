"""`HostMemory`: the memory of a run's keepers on this host as a storage of objects.

Checkpoints are committed, found and read in it as in a bucket. A file is in one keeper: that of the rank
that put it. What is listed is the union of all keepers.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ..object_folders import FOLDER_MARK, ObjectFolders
from ..storage import StoredFile
from .keeper_sockets import SCHEME
from .keepers import Keeper, KeptFile
from .remote_keeper import HostKeepers

if TYPE_CHECKING:
    from .memory_files import MemoryFiles

logger = logging.getLogger("ckpt_component.storage")
_Answer = TypeVar("_Answer")


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


class HostMemory(ObjectFolders):
    """See the top of this file. Thread-safe.

    Args:
        find: finds the keepers of the run to whose memory a path belongs; None: by their sockets on this host
        own: keeps what is put here, whether or not `find` finds it, too; None: this storage is read only (EROFS)
    """

    verifies_first = True

    def __init__(self, find: Callable[[str], Sequence[Keeper]] | None = None, own: Keeper | None = None) -> None:
        super().__init__(durable=False, atomic_rename=False, warns=False)
        self._find = HostKeepers() if find is None else find
        self._own = own
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._written: dict[int, _OpenFile] = {}

    def holds(self, path: str) -> bool:
        return path.startswith(SCHEME)

    # Folders

    def remove_tree(self, path: str) -> None:
        paths = [file.path for file in self._listed(path)]
        if not paths:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._delete(path, paths)

    def names(self, path: str) -> list[str]:
        below = len(path) + 1
        return sorted({file.path[below:].partition("/")[0] for file in self._listed(path)} - {FOLDER_MARK, ""})

    def is_folder(self, path: str) -> bool:
        return any(file.path != path for file in self._listed(path))

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

        return MemoryFiles(folder, partial(self._keepers, folder))

    # Small files

    def read(self, path: str, limit: int) -> bytes:
        for keeper in self._keepers(path):
            try:
                return keeper.get(path, limit)
            except FileNotFoundError:
                pass  # another keeper has it, or none
            except ConnectionError as error:
                self._pass_over(keeper, error)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def write_new(self, path: str, data: bytes) -> None:
        self.put_new(path, data, "")

    def write_over(self, path: str, data: bytes) -> None:
        own = self._writable(path)
        has_it = [keeper for keeper, files in self._answers(path, lambda each: each.listed(path)) if files]
        (has_it or [own])[0].put(path, data, new=False)

    def put_new(self, path: str, data: bytes, draft: str) -> None:
        self._refuse_taken(path)
        self._writable(path).put(path, data)

    def unlink(self, path: str) -> None:
        if self.size(path) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._delete(path, [path])

    def size(self, path: str) -> int | None:
        return next((file.size for file in self._listed(path) if file.path == path), None)

    def sizes(self, folder: str, names: Sequence[str]) -> dict[str, int | None]:
        found = {file.path: file.size for file in self._listed(folder)}
        return {name: found.get(os.path.join(folder, name)) for name in names}

    def files_below(self, path: str) -> Iterator[StoredFile]:
        for file in sorted(self._listed(path)):
            if os.path.basename(file.path) != FOLDER_MARK:
                yield StoredFile(file.path, file.size, 1, file.path)

    def modified(self, path: str) -> float:
        times = [file.modified for file in self._listed(path)]
        if not times:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return max(times)

    # Properties of a folder

    def try_folder(self, path: str, name: str) -> float:
        if self._own is None:  # the keepers are on this host, and so is their clock
            return self.clock.date()
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

    def _answers(self, path: str, ask: Callable[[Keeper], _Answer]) -> Iterator[tuple[Keeper, _Answer]]:
        """What each keeper answers. One that is gone has no files; one that is silent ends it with a TimeoutError."""
        for keeper in self._keepers(path):
            try:
                yield keeper, ask(keeper)
            except ConnectionError as error:
                self._pass_over(keeper, error)

    def _pass_over(self, keeper: Keeper, error: ConnectionError) -> None:
        if keeper is self._own:
            raise error
        logger.info("passed over what a keeper had: %s", error)

    def _listed(self, path: str) -> list[KeptFile]:
        """The file at a path and all below it, each once."""
        files = dict[str, KeptFile]()
        for _, listed in self._answers(path, lambda keeper: keeper.listed(path)):
            for file in listed:
                files.setdefault(file.path, file)
        return [*files.values()]

    def _delete(self, path: str, paths: Sequence[str]) -> None:
        self._writable(path)
        for _ in self._answers(path, lambda keeper: keeper.delete(paths)):
            pass

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
