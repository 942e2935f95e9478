"""What several snapshot servers have, as one `Storage`: checkpoints are committed, found and read as in a bucket.

A file is in one server; what is listed is what all of them have (`CombinedStorage`). `HostMemory` is the memory of a
run: a file is in the server of the rank that put it. Files to read are opened with the first one that is asked for;
from then on the bytes that are on this host are there, even if a server ends (`MemoryFiles`).
"""

from __future__ import annotations

import errno
import io
import itertools
import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from types import MappingProxyType
from typing import IO, Any, ClassVar, TypeVar

from ..core.outside import OUTSIDE, Outside
from ..core.pages import ScratchBlock
from ..core.storage.bucket_store import FOLDER_MARK, ObjectFolders
from ..core.storage.file_set import FileSet, FileStream, RangeRead
from ..core.storage.locate import MEMORY, MEMORY_FOLDER
from ..core.storage.safe_open import read_failure
from ..core.storage.storage import Storage, StoredFile
from .client import HostClients
from .stores import ListedFile, ReadableFile, SnapshotStore

logger = logging.getLogger("ckpt_component.storage")

_LEAST_THREADS, _MOST_THREADS = 2, 4
_STREAM_BYTES = 256 << 10


class MemoryFiles(FileSet):
    """The files that servers have in a folder; of two with one name, not the replica counts, else the first.

    Args:
        storage: knows the servers
        folder: folder of the checkpoint
    """

    def __init__(self, storage: CombinedStorage, folder: str) -> None:
        super().__init__(folder, storage.outside)
        self._storage = storage
        self._lock = storage.outside.lock()
        self._files = dict[str, ReadableFile]()
        #: The servers that were not asked yet; None: they are not known.
        self._unasked: list[SnapshotStore] | None = None
        self._until_closed = ExitStack()

    @property
    def seen_by_all(self) -> bool:
        """Whether all is in the memory of this host, where the ranks that wrote it have put it."""
        return all(file.is_here and not file.is_replica for file in self._opened().values())

    def size(self, name: str) -> int:
        return self._file(name).size

    def stream(self, name: str) -> IO[bytes]:
        return io.BufferedReader(FileStream(self, name, self.size(name)), _STREAM_BYTES)

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        file = self._file(name)
        try:
            return offset + buffer.nbytes <= file.size and file.fill(buffer, offset)
        except OSError as error:
            raise read_failure(os.path.join(self._folder, name), error) from error

    def view(self, name: str, offset: int, length: int) -> memoryview | None:
        """As for `FileSet`; memory that is mapped is not copied."""
        mapping = self._file(name).view(offset, length)
        return super().view(name, offset, length) if mapping is None else mapping

    def _file(self, name: str) -> ReadableFile:
        path = self._path(name)
        try:
            files = self._opened(name)
            if name not in files:
                raise not_found(path)
        except OSError as error:
            raise read_failure(path, error) from error
        return files[name]

    def _opened(self, name: str | None = None) -> Mapping[str, ReadableFile]:
        """The files, which are opened now if they are not: on all servers, or until there is one of this name."""
        with self._lock:
            if self._unasked is None:
                self._unasked = [*self._storage.servers_of(self._folder)]
            while self._unasked and (self._storage.opens_all or name not in self._files):
                server = self._unasked[0]
                try:
                    found = self._until_closed.enter_context(server.opened(self._folder))
                except ConnectionError as error:
                    self._storage.pass_over(server, error)
                    found = {}
                for each, file in found.items():
                    if each not in self._files or (self._files[each].is_replica and not file.is_replica):
                        self._files[each] = file
                del self._unasked[0]
            return self._files

    def _forget(self, name: str, offset: int, length: int) -> None:
        self._file(name).forget(offset, length)

    def _choose_ways(self, ordered: Sequence[RangeRead]) -> int:
        return min(max(os.cpu_count() or 1, _LEAST_THREADS), _MOST_THREADS, len(ordered))

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        with self._lock:
            self._files, self._unasked = {}, None
            self._until_closed.close()
        if not self._storage.opens_all:
            for server in self._storage.servers_of(self._folder):
                server.forget()


class HostFiles(FileSet):
    """The files of a folder: those of this host, which its file system reads, and those of others.

    Args:
        folder: folder of the checkpoint
        here: the files of this host; owned by this object
        elsewhere: those of others; owned, too
        is_here: whether this host has a path
    """

    def __init__(self, folder: str, here: FileSet, elsewhere: MemoryFiles, is_here: Callable[[str], bool]) -> None:
        super().__init__(folder, here.outside)
        self._here, self._elsewhere, self._is_here = here, elsewhere, is_here
        #: Where the files are that were asked for.
        self._places: dict[str, FileSet] = {}

    @property
    def block(self) -> ScratchBlock:
        return self._here.block

    def size(self, name: str) -> int:
        return self._place(name).size(name)

    def stream(self, name: str) -> IO[bytes]:
        return self._place(name).stream(name)

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        return self._place(name).fill(name, buffer, offset)

    def fill_block(self, name: str, offset: int, length: int) -> int | None:
        if self._place(name) is self._here:
            return self._here.fill_block(name, offset, length)
        return super().fill_block(name, offset, length)

    def read_all(self, reads: Sequence[RangeRead], *args: Any, **options: Any) -> None:
        """Read in file order, which is that of turns, and each place in the way that is best; see the base class."""
        ordered = sorted(reads, key=attrgetter("file"))
        for place, its in itertools.groupby(ordered, key=lambda read: self._place(read.file)):
            place.read_all([*its], *args, **options)

    def _place(self, name: str) -> FileSet:
        """Where a file is; elsewhere, if no host has it. Raises as `size`."""
        path = self._path(name)
        if name not in self._places:
            self._places[name] = self._here if self._is_here(path) else self._elsewhere
        return self._places[name]

    def _forget(self, name: str, offset: int, length: int) -> None:
        self._place(name)._forget(name, offset, length)

    def _choose_ways(self, ordered: Sequence[RangeRead]) -> int:
        return self._here._choose_ways(ordered)

    def __exit__(self, *exception: object) -> None:
        with self._here, self._elsewhere:
            super().__exit__(*exception)


_Answer = TypeVar("_Answer")


class CombinedStorage(Storage):
    """See the top of this file: what reads, lists and deletes."""

    #: Whether the files of a folder are opened on all servers with the first one, as a server may end, and its files
    #: with it; else a server is asked when those before it do not have a file, and what came is freed at the end.
    opens_all: ClassVar[bool] = True
    #: Which server has each file that was listed last, to be asked first: else reading all of them took a square.
    _holders: Mapping[str, SnapshotStore] = MappingProxyType({})

    @abstractmethod
    def servers_of(self, path: str) -> Sequence[SnapshotStore]:
        """All servers that may have a path, the own one first."""

    def pass_over(self, server: SnapshotStore, error: ConnectionError) -> None:
        """A server is gone: raise the error, unless its files are gone with it."""
        raise error

    # Folders

    def remove_tree(self, path: str) -> None:
        paths = [file.path for file in self._listed(path)]
        if not paths:
            raise not_found(path)
        for _ in self._answers(path, lambda client: client.delete(paths)):
            pass

    def names(self, path: str) -> list[str]:
        below = len(path) + 1
        return sorted({file.path[below:].partition("/")[0] for file in self._listed(path)} - {FOLDER_MARK, ""})

    def exists(self, path: str) -> bool:
        return any(files for _, files in self._listings(path))

    def is_folder(self, path: str) -> bool:
        return any(file.path != path for _, files in self._listings(path) for file in files)

    # Files

    def read(self, path: str, limit: int) -> bytes:
        holder = self._holders.get(path)
        for client in sorted(self.servers_of(path), key=lambda client: client is not holder):
            try:
                return client.get(path, limit)
            except FileNotFoundError:
                pass  # another server has it, or none
            except ConnectionError as error:
                self.pass_over(client, error)
        raise not_found(path)

    def unlink(self, path: str) -> None:
        """See `Storage`. If a server does not answer, which is an error, what those before it had is gone."""
        if not any([was_there for _, was_there in self._answers(path, lambda client: _taken(client, path))]):
            raise not_found(path)

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
            raise not_found(path)
        return max(times)

    def _answers(self, path: str, ask: Callable[[SnapshotStore], _Answer]) -> Iterator[tuple[SnapshotStore, _Answer]]:
        """What each server answers. One that is gone has no files; one that is silent ends it with a TimeoutError."""
        for client in self.servers_of(path):
            try:
                yield client, ask(client)
            except ConnectionError as error:
                self.pass_over(client, error)

    def _listings(self, path: str) -> Iterator[tuple[SnapshotStore, list[ListedFile]]]:
        """What each server has at a path and below it; see `_answers`."""
        return self._answers(path, lambda client: client.listed(path))

    def _listed(self, path: str) -> list[ListedFile]:
        """The file at a path and all below it, each once."""
        files, holders = dict[str, ListedFile](), dict[str, SnapshotStore]()
        for client, listed in self._listings(path):
            for file in listed:
                files.setdefault(file.path, file)
                holders.setdefault(file.path, client)
        if len(holders) > 1:  # those of a folder
            self._holders = holders
        return [*files.values()]


def not_found(path: str) -> FileNotFoundError:
    """The error of a path that no server has."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _taken(client: SnapshotStore, path: str) -> bool:
    """Delete a file from a server; returns whether it was there."""
    was_there = any(file.path == path for file in client.listed(path))
    if was_there:
        client.delete([path])
    return was_there


class HostMemory(CombinedStorage, ObjectFolders):
    """See the top of this file. Thread-safe.

    Args:
        find: finds the servers of the run to whose memory a path belongs; None: by their sockets on this host
        own: keeps what is put here, whether or not `find` finds it, too; None: this storage is read only (EROFS)
        outside: of this process
    """

    verifies_first = True
    shows_late = False
    common = f"folder {MEMORY_FOLDER} on each host, in all its containers"

    def __init__(
        self,
        find: Callable[[str], Sequence[SnapshotStore]] | None = None,
        own: SnapshotStore | None = None,
        outside: Outside = OUTSIDE,
    ) -> None:
        super().__init__(durable=False, atomic_rename=False, warns=False)
        self.outside = outside
        self._find = HostClients(outside=outside) if find is None else find
        self._own = own
        self._numbers = itertools.count(1)
        self._lock = outside.lock()
        #: Files that are being written: their paths, and their bytes so far; and which of them the server has.
        self._written, self._put = dict[int, tuple[str, io.BytesIO]](), set[int]()

    def holds(self, path: str) -> bool:
        return path.startswith(MEMORY)

    # Large files: none comes this way, as an image is put by its server

    def create(self, path: str, size: int = 0) -> int:
        self._taker_of(path)
        fd = next(self._numbers)
        with self._lock:
            self._written[fd] = path, io.BytesIO()
        return fd

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        with self._lock:
            _, data = self._written[fd]
            data.seek(offset)
            data.writelines(buffers)

    def sync(self, fd: int) -> None:
        path, data = self._written[fd]
        self._writable(path).put(path, data.getvalue(), new=fd not in self._put)
        self._put.add(fd)

    def close(self, fd: int) -> None:
        with self._lock:
            path, data = self._written.pop(fd)
        if fd not in self._put and not data.getvalue():  # an empty one is whole
            self._writable(path).put(path, b"")
        self._put.discard(fd)

    def open_files(self, folder: str, *, shared: bool = True) -> MemoryFiles:
        return MemoryFiles(self, folder)

    # Small files

    def write_over(self, path: str, data: bytes) -> None:
        own = self._writable(path)
        has_it = (client for client, files in self._listings(path) if files)
        next(has_it, own).put(path, data, new=False)

    def put_new(self, path: str, data: bytes, draft: str) -> None:
        self._taker_of(path).put(path, data)

    def unlink(self, path: str) -> None:
        self._writable(path)
        super().unlink(path)

    def remove_tree(self, path: str) -> None:
        self._writable(path)
        super().remove_tree(path)

    # Properties of a folder

    def try_folder(self, path: str, name: str) -> float:
        if self._own is not None:
            self.write_new(os.path.join(path, name), b"")
            self.unlink(os.path.join(path, name))
        return self.outside.date()  # the servers are on this host, and so is their clock

    def in_memory(self, path: str) -> bool:
        return True

    def servers_of(self, path: str) -> list[SnapshotStore]:
        own = [] if self._own is None else [self._own]
        return [*own, *self._find(path)]

    def pass_over(self, server: SnapshotStore, error: ConnectionError) -> None:
        if server is self._own:
            raise error
        logger.info("passed over what a snapshot server had: %s", error)

    def _taker_of(self, path: str) -> SnapshotStore:
        """As `_writable`, of a new file: raises FileExistsError if any server has it. The own one looks once more."""
        own = self._writable(path)
        if self.size(path) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return own

    def _writable(self, path: str) -> SnapshotStore:
        """The server that takes what is put."""
        if self._own is None:
            raise OSError(errno.EROFS, "what is in memory is changed by the process that keeps it alone", path)
        return self._own
