"""`HostFolders`: a folder of each host as one storage, for a job whose hosts share no disk; its files, and its commit.

Each rank writes files into the folder of its host. What is there is all that the hosts have: the folders of others are
served over the network. Small files that decide are put into each of them, first into that of this host: the manifest
of a checkpoint, the owner of the folder, the pointer to the newest. So each folder says what it is.

A checkpoint is committed like the creation of a manifest, on the host of the leading rank. Each rank writes into the
attempt's folder of its host, which it makes itself. The manifest says which host has which files; it is created on the
host of the leading rank, which is the commit, and then put on the other hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import IO, Any, TypeVar, cast

from ..core.commit.protocol import Attempt
from ..core.commit.protocols import ManifestCommit
from ..core.pages import ScratchBlock
from ..core.storage.file_set import FileSet, RangeRead
from ..core.storage.files import FileStorage
from ..core.storage.storage import Held, LocalFolders, Storage, StoredFile
from .host_memory import CombinedStorage, MemoryFiles, not_found
from .stores import SnapshotStore

_Method = TypeVar("_Method", bound=Callable[..., Any])


class HostFiles(FileSet):
    """The files of a folder: those of this host, which its file system reads, and those of others.

    Args:
        storage: the folders of all hosts
        folder: folder of the checkpoint
        shared: see `Storage.open_files`
    """

    def __init__(self, storage: HostFolders, folder: str, *, shared: bool) -> None:
        super().__init__(folder, storage.outside)
        self._storage = storage
        self._here = storage.fs.open_files(storage.here(folder), shared=shared)
        self._elsewhere = MemoryFiles(storage, folder)
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
            is_here = self._storage.fs.exists(self._storage.here(path))
            self._places[name] = self._here if is_here else self._elsewhere
        return self._places[name]

    def _forget(self, name: str, offset: int, length: int) -> None:
        self._place(name)._forget(name, offset, length)

    def _choose_ways(self, ordered: Sequence[RangeRead]) -> int:
        return self._here._choose_ways(ordered)

    def __exit__(self, *exception: object) -> None:
        with self._here, self._elsewhere:
            super().__exit__(*exception)
        for server in self._storage.servers_of(self._folder):
            server.forget()


logger = logging.getLogger("ckpt_component.storage")

_MOST_MADE = 256
#: To so many hosts a small file is sent at a time: each makes it durable.
_MOST_AT_ONCE = 16


def _here(method: _Method) -> _Method:
    """The method of the file system of this host: of a path there, or of what was opened there."""

    def forward(self: HostFolders, at: Any, *args: Any, **options: Any) -> Any:
        return getattr(self.fs, method.__name__)(self.here(at) if isinstance(at, str) else at, *args, **options)

    return cast(_Method, forward)


class HostFolders(CombinedStorage, LocalFolders):
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

    opens_all = False

    def __init__(
        self,
        files: FileStorage,
        root: str,
        folder: str,
        others: Sequence[SnapshotStore],
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

    @property
    def has_direct_io(self) -> bool:
        return self.fs.has_direct_io

    def holds(self, path: str) -> bool:
        return f"{path}/".startswith(f"{self.root}/")

    def here(self, path: str) -> str:
        return self.folder + path[len(self.root) :] if self.holds(path) else path

    def protocol(self) -> HostCommit:
        return HostCommit(self)

    # What is of this host alone: large files, which each rank writes here, and locks; and changes of empty folders

    make_folders, make_folder = _here(Storage.make_folders), _here(Storage.make_folder)
    sync_entry, remove_folder, touch = _here(Storage.sync_entry), _here(Storage.remove_folder), _here(Storage.touch)
    append, try_folder, free_bytes = _here(Storage.append), _here(Storage.try_folder), _here(Storage.free_bytes)
    in_memory, device, open_direct = _here(Storage.in_memory), _here(Storage.device), _here(Storage.open_direct)
    write, sync, close = _here(Storage.write), _here(Storage.sync), _here(Storage.close)
    start_writeback, truncate = _here(Storage.start_writeback), _here(Storage.truncate)
    drop_cached, read_held, release = _here(Storage.drop_cached), _here(Storage.read_held), _here(Storage.release)
    open_folder, flock = _here(LocalFolders.open_folder), _here(LocalFolders.flock)
    close_folder = _here(LocalFolders.close_folder)

    # Folders

    def sync_folder(self, path: str) -> None:
        try:
            self.fs.sync_folder(self.here(path))
        except FileNotFoundError:
            if path == self.root or not super().is_folder(path):
                raise  # else other hosts have it alone, and deletions there are durable

    def remove_tree(self, path: str) -> None:
        self._remove(path, self.fs.remove_tree, super().remove_tree)

    def _remove(self, path: str, here: Callable[[str], None], elsewhere: Callable[[str], None]) -> None:
        """Remove what this host has at a path, and what others have; raises FileNotFoundError if no host has it."""
        is_here = self.fs.exists(self.here(path))
        if is_here:
            here(self.here(path))
        try:
            elsewhere(path)
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
        return self.fs.is_real_folder(here) if self.fs.exists(here) else super().is_folder(path)

    # Large files, which are on this host

    def create(self, path: str, size: int = 0) -> int:
        fd = self.fs.create(self.here(path), size)
        self._made[path] = None
        if len(self._made) > _MOST_MADE:
            self._made.pop(next(iter(self._made)), None)
        return fd

    def hold(self, path: str) -> Held | None:
        if self.fs.size(self.here(path)) is None and super().size(path) is not None:
            return None  # another host's cannot be shared here
        return self.fs.hold(self.here(path))

    def share(self, held: Held, path: str) -> bool:
        return self.fs.share(held, self.here(path))

    def open_files(self, folder: str, *, shared: bool = True) -> HostFiles:
        return HostFiles(self, folder, shared=shared)

    # Small files

    def read(self, path: str, limit: int) -> bytes:
        return self._read(self.fs.read, path, limit)

    def read_again(self, path: str, limit: int) -> bytes:
        return self._read(self.fs.read_again, path, limit)

    def _read(self, here: Callable[[str, int], bytes], path: str, limit: int) -> bytes:
        try:
            return here(self.here(path), limit)
        except FileNotFoundError:
            return super().read(path, limit)

    def versions(self, path: str, limit: int) -> Iterator[bytes]:
        with contextlib.suppress(FileNotFoundError):
            yield self.fs.read(self.here(path), limit)
        for client in self.servers_of(path):
            with contextlib.suppress(FileNotFoundError):
                yield client.get(path, limit)

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
        def put(client: SnapshotStore) -> None:
            try:
                try:
                    client.put(path, data, new=False)
                except ConnectionAbortedError:  # it was damaged on its way
                    client.put(path, data, new=False)
            except OSError as error:
                logger.warning("%s is not on all hosts: %s", path, error)

        others = self.servers_of(path)
        with self.outside.pool(min(len(others), _MOST_AT_ONCE), "ckpt-put") as pool:
            list(pool.map(put, others))

    def unlink(self, path: str) -> None:
        if path in self._made:
            self._made.pop(path, None)
            self.fs.unlink(self.here(path))
        else:
            self._remove(path, self.fs.unlink, super().unlink)

    def size(self, path: str) -> int | None:
        size = self.fs.size(self.here(path))
        return super().size(path) if size is None else size

    def sizes(self, folder: str, names: Sequence[str]) -> dict[str, int | None]:
        found = self.fs.sizes(self.here(folder), names)
        missing = [name for name, size in found.items() if size is None]
        return found | super().sizes(folder, missing) if missing else found

    def files_below(self, path: str) -> Iterator[StoredFile]:
        here = self.here(path)
        own = {path + file.path[len(here) :]: file.size for file in self.fs.files_below(here)}
        yield from (StoredFile(at, size, 1, at) for at, size in own.items())
        yield from (file for file in super().files_below(path) if file.path not in own)

    def modified(self, path: str) -> float:
        here = self.here(path)
        times = [self.fs.modified(here)] if self.fs.exists(here) else []
        if self.fs.size(here) is None:
            times += [file.modified for file in self._listed(path)]
        if not times:
            raise not_found(path)
        return max(times)

    def changed(self, path: str) -> float:
        here = self.here(path)
        return self.fs.changed(here) if self.fs.exists(here) else super().modified(path)

    def servers_of(self, path: str) -> Sequence[SnapshotStore]:
        """Those of other hosts, if a path is in their folders."""
        return self._others if self.holds(path) else ()


class HostCommit(ManifestCommit):
    """See the top of this file.

    Args:
        storage: the folders of all hosts
    """

    storage: HostFolders

    def refuse_taken(self, target: str, file: str = "") -> None:
        """See the base class. Asks no other host, as each save calls it: what was committed has its manifest here."""
        ManifestCommit(self.storage.fs).refuse_taken(self.storage.here(target), file)

    def join(self, attempt: Attempt, seconds: float) -> None:
        """Make the attempt's folder on this host, and on that of the leading rank wait for it."""
        storage = self.storage
        if storage.leads:
            super().join(attempt, seconds)
            return
        for path in (attempt.target, attempt.staging):  # not the root, if it vanished
            with contextlib.suppress(FileExistsError):  # another rank of this host was first
                storage.make_folder(path)
            storage.sync_folder(os.path.dirname(path))

    def manifest_fields(
        self, attempt: Attempt, ranks: Sequence[Mapping[str, Any]], sidecars: Collection[str]
    ) -> Mapping[str, Any]:
        names, hosts = self.storage.hosts, dict[str, list[str]]()
        for rank in ranks:
            hosts.setdefault(names[rank["rank"]], []).extend(entry["name"] for entry in rank["files"])
        hosts[names[0]].extend(sidecars)
        return {**super().manifest_fields(attempt, ranks, sidecars), "hosts": hosts}

    def _committed_token(self, target: str) -> str | None:
        """See the base class: the manifest on this host says so, whether or not others can be asked."""
        return ManifestCommit(self.storage.fs)._committed_token(self.storage.here(target))
