"""`SimulatedFiles`: a `Storage` on a `Disk`, which fails where a test says.

Pass it to `build_manager(..., storage_of=lambda path: files)`, with the caller `inline`: another process would not see
the disk. Each operation that changes something has a number, from 1 on, so a test can let each of them fail in turn.
"""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from ..core.storage.file_set import FileSet, RangeRead
from ..core.storage.files import FileStorage
from ..core.storage.storage import Held, StoredFile
from ..errors import CheckpointCorruptError
from .disk import Disk, DiskFile, DiskFolder

T = TypeVar("T")

#: Where descriptors begin: far from those of the process.
_FIRST_DESCRIPTOR = 1 << 24


class PowerCut(SystemExit):
    """The machine is off: raised by the operation at which it happens, and by each one after it.

    Derived from SystemExit, so that no handler of errors takes it for one, and a thread ends with it in silence.
    """


@dataclass(frozen=True)
class Fault:
    """What happens at an operation.

    Attributes:
        kind: `cut`: the power goes off before it. `fail`: it does nothing and raises. `lost`: it is done, and raises.
        code: the `errno` of what is raised
        lasts: whether every later operation fails too
    """

    kind: str
    code: int = errno.EIO
    lasts: bool = False


class SimulatedFiles(FileStorage):
    """Files on a simulated disk. Thread-safe.

    Args:
        disk: the disk
        faults: what happens at the operations with these numbers
        atomic_rename: see `Storage`
        locks: whether there are file locks
        durable: False: nothing is synced, as with `durability=process_crash`
        counts: whether the operations at a path have numbers; None: at every path

    Attributes:
        operations: `(name, path)` of each operation that has a number, in their order
        is_off: whether the power is off
    """

    def __init__(
        self,
        disk: Disk,
        faults: Mapping[int, Fault] | None = None,
        *,
        atomic_rename: bool = True,
        locks: bool = True,
        durable: bool = True,
        counts: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(durable=durable, atomic_rename=atomic_rename, warns=False)
        self.disk = disk
        self.operations: list[tuple[str, str]] = []
        self._faults = {} if faults is None else faults
        self._locks = locks
        self._counts = counts or (lambda path: True)
        self._lasting: Fault | None = None
        self.is_off = False
        self._descriptors = itertools.count(_FIRST_DESCRIPTOR)
        self._open: dict[int, tuple[str, DiskFile]] = {}
        #: Open folder -> path, folder, and the lock that is held by it, if any.
        self._folders: dict[int, tuple[str, DiskFolder, int]] = {}
        self._lock = threading.RLock()

    def turn_off(self) -> None:
        """Let the power go off now: what still runs here gets `PowerCut`. Then call `Disk.cut_power`."""
        with self._lock:
            self.is_off = True

    def at_disk(self) -> AbstractContextManager[Disk]:
        """The disk, for one operation; a subclass may let something happen before it. Raises `PowerCut`."""
        return self._held()

    @contextmanager
    def _held(self) -> Iterator[Disk]:
        with self._lock:
            if self.is_off:
                raise PowerCut
            yield self.disk

    def change(self, operation: str, path: str, effect: Callable[[], T]) -> T:
        """An operation that changes something."""
        with self.at_disk():
            fault = self._fault_at(operation, path)
            if fault is not None and fault.kind == "cut":
                self.is_off = True
                raise PowerCut
            if fault is not None and fault.kind == "fail":
                raise OSError(fault.code, os.strerror(fault.code), path)
            done = effect()
            if fault is not None and fault.kind == "lost":
                raise OSError(fault.code, os.strerror(fault.code), path)
            return done

    def _fault_at(self, operation: str, path: str) -> Fault | None:
        if not self._counts(path):
            return None
        self.operations.append((operation, path))
        fault = self._faults.get(len(self.operations), self._lasting)
        if fault is not None and fault.lasts:
            self._lasting = fault
        return fault

    # Operations that change something

    @property
    def has_direct_io(self) -> bool:
        return False

    def make_folder(self, path: str) -> None:
        self.change("make_folder", path, lambda: self.disk.add(path, DiskFolder()))

    def create(self, path: str, size: int = 0) -> int:
        def effect() -> int:
            file = DiskFile()
            self.disk.add(path, file)
            if size:
                file.resize(size)
            return self._opened(path, file)

        return self.change("create", path, effect)

    def open_over(self, path: str) -> int:
        def effect() -> int:
            if self.disk.find(path) is None:
                self.disk.add(path, DiskFile())
            file = self.disk.file(path)
            file.resize(0)
            return self._opened(path, file)

        return self.change("open_over", path, effect)

    def open_again(self, path: str) -> int:
        return self.change("open_again", path, lambda: self._opened(path, self.disk.file(path)))

    def open_to_serve(self, path: str) -> int:
        """A real descriptor, of a file that has what is there now."""
        data = self.read(path, 1 << 30)
        descriptor = os.memfd_create("file of a simulated disk", os.MFD_CLOEXEC)
        os.write(descriptor, data)
        return descriptor

    def open_append(self, path: str) -> int:
        raise NotImplementedError  # `append` is one operation here

    def _opened(self, path: str, file: DiskFile) -> int:
        fd = next(self._descriptors)
        self._open[fd] = path, file
        return fd

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        path, file = self._open[fd]
        data = b"".join(buffers)

        def effect() -> None:
            self._take_room(file, offset + len(data), path)
            file.write(data, offset)
            file.modified = self.disk.tick()

        self.change("write", path, effect)

    def _take_room(self, file: DiskFile, end: int, path: str) -> None:
        more = max(end - len(file.data), 0)
        if self.disk.bytes_free is not None:
            if more > self.disk.bytes_free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            self.disk.bytes_free -= more

    def append(self, path: str, data: bytes) -> None:
        def effect() -> None:
            if self.disk.find(path) is None:
                self.disk.add(path, DiskFile())
            file = self.disk.file(path)
            file.write(data, len(file.data))
            file.modified = self.disk.tick()

        self.change("append", path, effect)

    def copy(self, fd: int, source: int, offset: int, length: int) -> None:
        (path, file), (_, other) = self._open[fd], self._open[source]
        data = bytes(other.data[offset : offset + length])
        if len(data) < length:
            raise OSError(errno.EIO, f"the file ends at {offset + len(data)} and {offset + length} were expected")
        self.change("copy", path, lambda: file.write(data, offset))

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        """Nothing here depends on it."""

    def drop_cached(self, fd: int) -> None:
        """Nothing here depends on it."""

    def sync(self, fd: int) -> None:
        path, file = self._open[fd]
        self.change("sync", path, file.sync if self.durable else lambda: None)

    def close(self, fd: int) -> None:
        path, _ = self._open[fd]
        try:
            self.change("close", path, lambda: None)
        finally:
            self._open.pop(fd, None)  # as Linux does, also when it fails

    def link(self, source: str, target: str) -> None:
        self.change("link", target, lambda: self.disk.add(target, self.disk.file(source)))

    def hold(self, path: str) -> Held | None:
        with self.at_disk() as disk:
            return self._opened(path, disk.file(path))

    def read_held(self, held: Held, buffer: memoryview, offset: int) -> None:
        with self.at_disk():
            buffer[:] = self._open[int(held)][1].data[offset : offset + len(buffer)]

    def release(self, held: Held) -> None:
        self._open.pop(int(held), None)  # of a process that may have ended

    def share(self, held: Held, path: str) -> bool:
        def effect() -> None:
            file = self._open[int(held)][1]
            self.disk.add(path, file)
            if self.durable:
                file.sync()

        self.change("share", path, effect)
        return True

    def rename_new(self, source: str, target: str) -> bool:
        self.change("rename_new", target, lambda: self.disk.move(source, target, over=False))
        return True

    def exchange(self, one: str, other: str) -> None:
        self.change("exchange", other, lambda: self.disk.exchange(one, other))

    def replace(self, source: str, target: str) -> None:
        self.change("replace", target, lambda: self.disk.move(source, target, over=True))

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        def effect() -> None:
            self.disk.file(path)  # of a folder, it is an error
            self.disk.remove(path)

        self.change("unlink", path, effect)

    def remove_folder(self, path: str, *, dir_fd: int | None = None) -> None:
        def effect() -> None:
            self.disk.folder(path)
            self.disk.remove(path)

        self.change("remove_folder", path, effect)

    def remove_tree(self, path: str) -> None:
        with self.at_disk() as disk:
            folder = disk.folder(path)
        for name in sorted(folder.entries):
            below = os.path.join(path, name)
            (self.remove_tree if isinstance(folder.entries[name], DiskFolder) else self.unlink)(below)
        self.remove_folder(path)

    def sync_folder(self, path: str) -> None:
        if self.durable:
            self.change("sync_folder", path, lambda: self.disk.sync_folder(path))

    def touch(self, path: str) -> None:
        with self.at_disk() as disk:
            disk.file(path).modified = disk.tick()

    # Looks

    def names(self, path: str) -> list[str]:
        with self.at_disk() as disk:
            return sorted(disk.folder(path).entries) if disk.find(path) is not None else []

    def exists(self, path: str) -> bool:
        with self.at_disk() as disk:
            return disk.find(path) is not None

    def is_folder(self, path: str) -> bool:
        with self.at_disk() as disk:
            return isinstance(disk.find(path), DiskFolder)

    def is_real_folder(self, path: str) -> bool:
        return self.is_folder(path)

    def size(self, path: str) -> int | None:
        with self.at_disk() as disk:
            node = disk.find(path)
            return len(node.data) if isinstance(node, DiskFile) else None

    def file_at(self, path: str) -> StoredFile | None:
        with self.at_disk() as disk:
            node = disk.find(path)
            if not isinstance(node, DiskFile):
                return None
            return StoredFile(path, len(node.data), sum(disk.find(each) is node for each in disk.walk()), id(node))

    def try_folder(self, path: str, name: str) -> float:
        trial = os.path.join(path, name)
        self.close(self.create(trial))
        made = self.modified(trial)
        self.unlink(trial)
        return made

    def free_bytes(self, path: str) -> int | None:
        with self.at_disk() as disk:
            return disk.bytes_free

    def in_memory(self, path: str) -> bool:
        return False

    def read(self, path: str, limit: int) -> bytes:
        with self.at_disk() as disk:
            data = bytes(disk.file(path).data)
        if len(data) > limit:
            raise OSError(errno.EFBIG, f"{len(data)} bytes, and at most {limit} were expected", path)
        return data

    def read_again(self, path: str, limit: int) -> bytes:
        return self.read(path, limit)

    def modified(self, path: str) -> float:
        with self.at_disk() as disk:
            node = disk.find(path)
            times = [entry.modified for entry in node.entries.values()] if isinstance(node, DiskFolder) else []
            return max([self.changed(path), *times])

    def changed(self, path: str) -> float:
        with self.at_disk() as disk:
            node = disk.find(path)
            if node is None:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return node.modified

    def identity(self, path: str) -> tuple[int, int]:
        with self.at_disk() as disk:
            return id(disk), id(disk.file(path))

    def is_open_elsewhere(self, path: str) -> bool:
        with self.at_disk() as disk:
            file = disk.file(path)
            return any(other is file for _, other in self._open.values())

    def device(self, path: str) -> int:
        with self.at_disk() as disk:
            disk.folder(path)
            return 1

    # Locks

    def open_folder(self, path: str) -> int:
        with self.at_disk() as disk:
            fd = next(self._descriptors)
            self._folders[fd] = path, disk.folder(path), fcntl.LOCK_UN
            return fd

    def flock(self, fd: int, how: int) -> None:
        with self.at_disk():
            if not self._locks:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            path, folder, _ = self._folders[fd]
            kind = how & ~fcntl.LOCK_NB
            others = {held for other, (_, it, held) in self._folders.items() if other != fd and it is folder}
            self._folders[fd] = path, folder, fcntl.LOCK_UN  # a conversion gives up the old lock first
            if (kind == fcntl.LOCK_EX and others - {fcntl.LOCK_UN}) or (
                kind == fcntl.LOCK_SH and fcntl.LOCK_EX in others
            ):
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)
            self._folders[fd] = path, folder, kind

    def close_folder(self, fd: int) -> None:
        with self._lock:  # the lock is gone, whether the power is on or off
            self._folders.pop(fd, None)

    # Reads of ranges

    def open_files(self, folder: str, *, shared: bool = True) -> Any:
        return _SimulatedFileSet(self, folder)


class _SimulatedFileSet(FileSet):
    """The files of a folder of a simulated disk."""

    def __init__(self, files: SimulatedFiles, folder: str) -> None:
        super().__init__(folder, files.outside)
        self._files = files

    def _bytes(self, name: str) -> bytes:
        path = self._path(name)
        try:
            return self._files.read(path, 1 << 62)
        except OSError as error:
            raise CheckpointCorruptError(f"{path} cannot be read: {error.strerror}.") from error

    def size(self, name: str) -> int:
        return len(self._bytes(name))

    def stream(self, name: str) -> IO[bytes]:
        return io.BytesIO(self._bytes(name))

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        data = self._bytes(name)[offset : offset + buffer.nbytes]
        buffer[: len(data)] = data
        return len(data) == buffer.nbytes

    def _forget(self, name: str, offset: int, length: int) -> None:
        """Nothing is cached."""

    def _choose_ways(self, ordered: Sequence[RangeRead]) -> int:
        return 1
