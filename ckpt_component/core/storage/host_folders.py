"""`HostFolders`: a folder of each host as one storage, for a job whose hosts share no disk.

Each rank writes files into the folder of its host. What is there is the union of all folders: those of other hosts are
reached as keepers over the network. Small files that decide are put into each of them, first into that of this host:
the manifest of a checkpoint, the owner of the folder, the pointer to the newest. So each folder says what it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from .files import FileStorage
from .memory.keeper_union import KeeperUnion
from .memory.keepers import Keeper
from .storage import Held, LocalFolders, StoredFile

if TYPE_CHECKING:
    from .host_files import HostFiles

logger = logging.getLogger("ckpt_component.storage")

_MOST_MADE = 256
#: To so many hosts a small file is sent at a time: each makes it durable.
_MOST_AT_ONCE = 16


class HostFolders(KeeperUnion, LocalFolders):
    """See the top of this file. Paths outside of `root` are those of this host. Thread-safe.

    Args:
        files: the file system of this host
        root: the path that all ranks have for the folder: what the leading rank calls it
        folder: its path on this host
        others: the folders of the other hosts
        hosts: the host of each rank
        rank: this rank

    Attributes:
        root, folder, hosts: see above
        fs: the file system of this host
        leads: whether this is the host of the leading rank
    """

    def __init__(
        self,
        files: FileStorage,
        root: str,
        folder: str,
        others: Sequence[Keeper],
        hosts: Sequence[str] = ("",),
        rank: int = 0,
    ) -> None:
        super().__init__(durable=files.durable, atomic_rename=files.atomic_rename, warns=files.warns)
        self.root = root
        self.folder = folder
        self.hosts = hosts
        self.leads = hosts[rank] == hosts[0]
        self.fs = files
        self.outside = files.outside
        self._others = others
        #: Files that this process has made, which no other host has: the last ones, in their order.
        self._made: dict[str, None] = {}
        #: Who has the files of the folder that was looked through last.
        self._places: dict[str, Keeper] = {}

    @property
    def has_direct_io(self) -> bool:
        return self.fs.has_direct_io

    def holds(self, path: str) -> bool:
        return f"{path}/".startswith(f"{self.root}/")

    def here(self, path: str) -> str:
        return self.folder + path[len(self.root) :] if self.holds(path) else path

    # Folders

    def make_folders(self, path: str) -> None:
        self.fs.make_folders(self.here(path))

    def make_folder(self, path: str) -> None:
        self.fs.make_folder(self.here(path))

    def sync_entry(self, path: str) -> None:
        self.fs.sync_entry(self.here(path))

    def sync_folder(self, path: str) -> None:
        try:
            self.fs.sync_folder(self.here(path))
        except FileNotFoundError:
            if path == self.root or not super().is_folder(path):
                raise  # else other hosts have it alone, and deletions there are durable

    def remove_folder(self, path: str) -> None:
        self.fs.remove_folder(self.here(path))

    def remove_tree(self, path: str) -> None:
        here = self.here(path)
        is_here = self.fs.exists(here)
        if is_here:
            self.fs.remove_tree(here)
        try:
            super().remove_tree(path)
        except FileNotFoundError:
            if not is_here:
                raise

    def names(self, path: str) -> list[str]:
        return sorted({*self.fs.names(self.here(path)), *super().names(path)})

    def exists(self, path: str) -> bool:
        return self.fs.exists(self.here(path)) or super().exists(path)

    def is_folder(self, path: str) -> bool:
        return self.fs.is_folder(self.here(path)) or super().is_folder(path)

    def is_real_folder(self, path: str) -> bool:
        here = self.here(path)
        if self.fs.exists(here):
            return self.fs.is_real_folder(here)
        return super().is_folder(path)

    # Large files, which are on this host

    def create(self, path: str, size: int = 0) -> int:
        fd = self.fs.create(self.here(path), size)
        self._made[path] = None
        if len(self._made) > _MOST_MADE:
            self._made.pop(next(iter(self._made)), None)
        return fd

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self.fs.write(fd, buffers, offset)

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        self.fs.start_writeback(fd, offset, length)

    def sync(self, fd: int) -> None:
        self.fs.sync(fd)

    def open_direct(self, path: str) -> int:
        return self.fs.open_direct(self.here(path))

    def truncate(self, fd: int, size: int) -> None:
        self.fs.truncate(fd, size)

    def drop_cached(self, fd: int) -> None:
        self.fs.drop_cached(fd)

    def close(self, fd: int) -> None:
        self.fs.close(fd)

    def hold(self, path: str) -> Held | None:
        try:
            return self.fs.hold(self.here(path))
        except FileNotFoundError:
            if super().size(path) is None:
                raise
            return None  # another host's cannot be shared here

    def share(self, held: Held, path: str) -> bool:
        return self.fs.share(held, self.here(path))

    def read_held(self, held: Held, buffer: memoryview, offset: int) -> None:
        self.fs.read_held(held, buffer, offset)

    def release(self, held: Held) -> None:
        self.fs.release(held)

    def open_files(self, folder: str, *, shared: bool = True) -> HostFiles:
        from .host_files import HostFiles  # processes that only write do not load it

        here = self.here(folder)
        is_here = partial(_is_in, self.fs, here)
        return HostFiles(folder, self.fs.open_files(here, shared=shared), is_here, self._keepers(folder))

    # Small files

    def read(self, path: str, limit: int) -> bytes:
        try:
            return self.fs.read(self.here(path), limit)
        except FileNotFoundError:
            return self._read_elsewhere(path, limit)

    def versions(self, path: str, limit: int) -> Iterator[bytes]:
        with contextlib.suppress(FileNotFoundError):
            yield self.fs.read(self.here(path), limit)
        for keeper in self._keepers(path):
            with contextlib.suppress(FileNotFoundError):
                yield keeper.get(path, limit)

    def read_again(self, path: str, limit: int) -> bytes:
        try:
            return self.fs.read_again(self.here(path), limit)
        except FileNotFoundError:
            return self._read_elsewhere(path, limit)

    def _read_elsewhere(self, path: str, limit: int) -> bytes:
        """Read a file that is not on this host; who is known to have it is asked first."""
        if path in self._places:
            with contextlib.suppress(FileNotFoundError):  # deleted since
                return self._places[path].get(path, limit)
        return super().read(path, limit)

    def write_over(self, path: str, data: bytes) -> None:
        """See the base class; on all hosts, first on this one."""
        here = self.here(path)
        if self.holds(path) and not self.fs.exists(os.path.dirname(here)) and self.exists(os.path.dirname(path)):
            self.fs.make_folders(os.path.dirname(here))  # other hosts have it alone
        self.fs.write_over(here, data)
        self._put_elsewhere(path, data)

    def put_new(self, path: str, data: bytes, draft: str) -> None:
        """See the base class; on this host. The others get it then, whatever they had there."""
        self.fs.put_new(self.here(path), data, self.here(draft))
        self._put_elsewhere(path, data)

    def _put_elsewhere(self, path: str, data: bytes) -> None:
        def put(keeper: Keeper) -> None:
            try:
                try:
                    keeper.put(path, data, new=False)
                except ConnectionAbortedError:  # it was damaged on its way
                    keeper.put(path, data, new=False)
            except OSError as error:
                logger.warning("%s is not on all hosts: %s", path, error)

        keepers = self._keepers(path)
        if keepers:
            with self.outside.pool(min(len(keepers), _MOST_AT_ONCE), "ckpt-put") as pool:
                list(pool.map(put, keepers))

    def append(self, path: str, data: bytes) -> None:
        self.fs.append(self.here(path), data)

    def unlink(self, path: str) -> None:
        here = self.here(path)
        if path in self._made:
            self._made.pop(path, None)
            self.fs.unlink(here)
            return
        is_here = self.fs.exists(here)
        if is_here:
            self.fs.unlink(here)
        try:
            super().unlink(path)
        except FileNotFoundError:
            if not is_here:
                raise

    def size(self, path: str) -> int | None:
        size = self.fs.size(self.here(path))
        return super().size(path) if size is None else size

    def sizes(self, folder: str, names: Sequence[str]) -> dict[str, int | None]:
        found = self.fs.sizes(self.here(folder), names)
        if None not in found.values():
            return found
        places, elsewhere = dict[str, Keeper](), dict[str, int]()
        for keeper, files in self._answers(folder, lambda keeper: keeper.listed(folder)):
            places.update((file.path, keeper) for file in files)
            elsewhere.update((file.path, file.size) for file in files)
        self._places = places
        return {
            name: elsewhere.get(os.path.join(folder, name)) if size is None else size for name, size in found.items()
        }

    def files_below(self, path: str) -> Iterator[StoredFile]:
        here, own = self.here(path), set[str]()
        for file in self.fs.files_below(here):
            at = path + file.path[len(here) :]
            own.add(at)
            yield StoredFile(at, file.size, 1, at)
        yield from (file for file in super().files_below(path) if file.path not in own)

    def modified(self, path: str) -> float:
        here, times = self.here(path), list[float]()
        if self.fs.exists(here):
            times.append(self.fs.modified(here))
            if self.fs.size(here) is not None:
                return times[0]
        try:
            times.append(super().modified(path))
        except FileNotFoundError:
            if not times:
                raise
        return max(times)

    def changed(self, path: str) -> float:
        here = self.here(path)
        return self.fs.changed(here) if self.fs.exists(here) else super().modified(path)

    def touch(self, path: str) -> None:
        self.fs.touch(self.here(path))

    # Properties of a folder: those of this host

    def try_folder(self, path: str, name: str) -> float:
        return self.fs.try_folder(self.here(path), name)

    def free_bytes(self, path: str) -> int | None:
        return self.fs.free_bytes(self.here(path))

    def in_memory(self, path: str) -> bool:
        return self.fs.in_memory(self.here(path))

    def device(self, path: str) -> int:
        return self.fs.device(self.here(path))

    # Locks, of this host

    def open_folder(self, path: str) -> int:
        return self.fs.open_folder(self.here(path))

    def flock(self, fd: int, how: int) -> None:
        self.fs.flock(fd, how)

    def close_folder(self, fd: int) -> None:
        self.fs.close_folder(fd)

    def _keepers(self, path: str) -> Sequence[Keeper]:
        """The folders of other hosts, if a path is in them."""
        return self._others if self.holds(path) else ()

    def _pass_over(self, keeper: Keeper, error: ConnectionError) -> None:
        raise error  # its disk still has its files


def _is_in(files: FileStorage, folder: str, name: str) -> bool:
    return files.exists(os.path.join(folder, name))
