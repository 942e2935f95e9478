"""`Storage`: what checkpoints need from the place they are stored in. The whole contract is on this page.

`FileStorage` (files), `ObjectStorage` (objects) and `HostMemory` (memory of this host) implement it. Paths are
absolute; those of a bucket begin with a scheme, such as `s3://bucket/prefix`, and are joined and split like paths of
files. A bucket has no folders: one exists while it has an entry. Commit, scan, cleanup, fencing and readers are written
against this interface.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..outside import OUTSIDE, Outside
from .safe_open import READ_TWICE

if TYPE_CHECKING:
    from .file_set import FileSet  # processes that only write do not load it

logger = logging.getLogger("ckpt_component.storage")

#: A file that is held to be shared: its open descriptor, or the path of an object.
Held = int | str


class StoredFile(NamedTuple):
    """A file that a path leads to.

    Attributes:
        path: the path
        size: in bytes
        paths: how many paths lead to the file, see `Storage.share`
        identity: equal, within a storage, where two paths lead to one file
    """

    path: str
    size: int
    paths: int
    identity: Hashable


class Storage(ABC):
    """The operations of saves and loads on one kind of storage.

    All methods raise OSError: FileNotFoundError and FileExistsError where they say so, others for what the storage
    reports, with an `errno`.

    Args:
        durable: `True`: `sync` and `sync_folder` return when the bytes survive a power cut. `False`: they survive only
            the end of the process.
        atomic_rename: whether a folder can be renamed in one step; only files have it, see `FileStorage`
        options: `checkpoint.storage.options`, which a bucket was opened with; may hold secrets, so it is never logged
        warns: whether to warn, once, if there are no locks. A writer process leaves that to its trainer.

    Attributes:
        outside: of the process that uses the storage: waits for what happens there go by it
        verifies_first: whether a load verifies all bytes before it fills a tensor, as reading them twice costs no disk
        shows_late: whether what another process has put may be seen a while later; else what is not there never comes
        common: what all ranks need to see each other's files, for errors
        hosts: the host of each rank, where each host has its own folder, see `HostFolders`; else empty
    """

    outside: Outside = OUTSIDE
    verifies_first: ClassVar[bool] = False
    shows_late: ClassVar[bool] = True
    common: ClassVar[str] = "checkpoint.dir on a file system that they share"
    hosts: Sequence[str] = ()

    def __init__(
        self,
        *,
        durable: bool = True,
        atomic_rename: bool = True,
        options: Mapping[str, Any] | None = None,
        warns: bool = True,
    ) -> None:
        self.durable = durable
        self.atomic_rename = atomic_rename
        self.options = options or {}
        self.warns = warns

    @property
    def has_direct_io(self) -> bool:
        """Whether files can be written past the page cache, with `open_direct`."""
        return False

    @property
    def streams(self) -> bool:
        """Whether `write` takes the bytes of a file in order only, and reads their memory later."""
        return False

    @property
    def home(self) -> str | None:
        """The folder from which a process without site-packages imports what this needs; None: nothing."""
        return None

    def holds(self, path: str) -> bool:
        """Whether an absolute path is in this storage."""
        return "://" not in path

    def protocol(self) -> Any:
        """The `CommitProtocol` of a storage that has one of its own; None: it commits as its kind does."""
        return None

    # Folders

    @abstractmethod
    def make_folders(self, path: str) -> None:
        """Create a folder and its missing parents, and make each entry durable, as `sync_entry` does."""

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Create one folder; raises FileExistsError if it exists, FileNotFoundError if its parent does not."""

    def sync_folder(self, path: str) -> None:
        """Make a folder's entries durable (new, renamed and deleted names)."""

    def sync_entry(self, path: str) -> None:
        """Make a folder that is there durable: who made it may have been killed, or may not have done so yet."""

    @abstractmethod
    def remove_folder(self, path: str) -> None:
        """Delete one empty folder."""

    @abstractmethod
    def remove_tree(self, path: str) -> None:
        """Delete a folder and everything in it; links are deleted, never followed."""

    @abstractmethod
    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted; empty if the folder does not exist."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file, a folder or anything else, such as a broken link."""

    @abstractmethod
    def is_folder(self, path: str) -> bool:
        """Whether the path is a folder or a link to one."""

    @abstractmethod
    def is_real_folder(self, path: str) -> bool:
        """Whether the path is a folder and not a link."""

    # Large files, written by range

    @abstractmethod
    def create(self, path: str, size: int = 0) -> int:
        """Create a file that must not exist yet, of `size` bytes; returns a descriptor for the methods below."""

    @abstractmethod
    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Write all `buffers` one after the other from `offset` on.

        Ranges may come in any order and from several threads. If the storage `streams`, those of a file must come in
        order, one at a time, and their memory must not change until `sync` or `close` returns.
        """

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        """Start making a range durable that will be synced later. Does not wait."""

    @abstractmethod
    def sync(self, fd: int) -> None:
        """Make a file's bytes durable; must be called by the process that wrote them."""

    def open_direct(self, path: str) -> int:
        """Open a file made by `create` a second time, for direct I/O in whole pages; only with `has_direct_io`."""
        raise not_here("direct I/O")

    def truncate(self, fd: int, size: int) -> None:
        """Truncate a file to `size` bytes; only with `has_direct_io`."""
        raise not_here("truncation")

    def drop_cached(self, fd: int) -> None:
        """Drop the pages of a synced file from the page cache, so that they do not evict the training's data."""

    @abstractmethod
    def close(self, fd: int) -> None:
        """Close a descriptor. A file that was not synced may be lost."""

    def hold(self, path: str) -> Held | None:
        """Hold a finished file for `share`; None: it cannot be shared.

        A file is open until `release`, so it can be shared even when no path leads to it; an object, while it exists.
        """
        return None

    def share(self, held: Held, path: str) -> bool:
        """Make a held file appear at `path` too, with the same bytes. `sync_folder` makes it durable.

        Args:
            held: from `hold`, of this process or sent to it
            path: where there is no file yet

        Returns:
            True: no byte was sent or written: both paths lead to one file, or the store copied its object. False: it
            had to be copied.
        """
        raise not_here("a file with several paths")

    def read_held(self, held: Held, buffer: memoryview, offset: int) -> None:
        """Fill a buffer from a held file; raises OSError if the file is too short."""
        raise not_here("held files")

    def release(self, held: Held) -> None:
        """Let go of what `hold` has returned. It changes nothing in the storage."""

    def open_files(self, folder: str, *, shared: bool = True) -> FileSet:
        """Open the files of one checkpoint folder for reads of ranges, in parallel; the caller closes the result.

        Args:
            folder: folder of the files
            shared: whether other processes on this host read the same files at the same time
        """
        raise not_here("reads of ranges")

    # Small files, read and written as a whole

    @abstractmethod
    def read(self, path: str, limit: int) -> bytes:
        """Read a file of at most `limit` bytes; refuses links, FIFOs and the like. Raises FileNotFoundError."""

    def versions(self, path: str, limit: int) -> Iterator[bytes]:
        """Read a file from each host that has it, this one first, if each has its own folder; else as `read`."""
        yield self.read(path, limit)

    def read_again(self, path: str, limit: int) -> bytes:
        """Like `read`, past caches: for a file that was not as expected."""
        return self.read(path, limit)

    def read_verified(self, path: str, limit: int, crc: int) -> bytes | None:
        """Read a small file and compare its CRC-32, if it differs once more past caches.

        Returns:
            Its bytes; None if they are damaged in both answers.
        """
        data = self.read(path, limit)
        if zlib.crc32(data) == crc:
            return data
        data = self.read_again(path, limit)
        if zlib.crc32(data) != crc:
            return None
        logger.warning(READ_TWICE, path)
        return data

    def write_new(self, path: str, data: bytes) -> None:
        """Durably write one small file that must not exist yet."""
        with self.durable_at_end(self.create(path)) as fd:
            self.write(fd, [memoryview(data)], 0)

    @contextlib.contextmanager
    def durable_at_end(self, fd: int, *, cached: bool = True) -> Iterator[int]:
        """A file that is open for writing: at the end of the block it is synced and closed; after an error, closed.

        Args:
            fd: from `create` and the like
            cached: whether the page cache may keep its bytes
        """
        try:
            yield fd
            self.sync(fd)
            if not cached:
                self.drop_cached(fd)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to report
                self.close(fd)
            raise
        self.close(fd)

    @abstractmethod
    def write_over(self, path: str, data: bytes) -> None:
        """Durably write or replace one small file; readers see either the old bytes or the new ones."""

    @abstractmethod
    def put_new(self, path: str, data: bytes, draft: str) -> None:
        """Create a small file in one step; raises FileExistsError if the name is taken.

        After any other error the file may exist anyway; read it back to find out.

        Args:
            path: path of the file
            data: content of the file
            draft: a synced file with the same content
        """

    @abstractmethod
    def append(self, path: str, data: bytes) -> None:
        """Add to the end of a file, which is made if there is none. Not durable."""

    @abstractmethod
    def unlink(self, path: str) -> None:
        """Delete one file; raises FileNotFoundError."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """The size of a regular file in bytes, or None if there is none (links do not count)."""

    def sizes(self, folder: str, names: Sequence[str]) -> dict[str, int | None]:
        """The `size` of several files in a folder, by name."""
        return {name: self.size(os.path.join(folder, name)) for name in names}

    def file_at(self, path: str) -> StoredFile | None:
        """The regular file that a path leads to, or None if there is none (links do not count)."""
        size = self.size(path)
        return None if size is None else StoredFile(path, size, 1, path)

    def files_below(self, path: str) -> Iterator[StoredFile]:
        """All regular files in a folder and in its folders, or the file itself; links are not followed."""
        if self.is_real_folder(path):
            for name in self.names(path):
                yield from self.files_below(os.path.join(path, name))
        elif (file := self.file_at(path)) is not None:
            yield file

    @abstractmethod
    def modified(self, path: str) -> float:
        """When a file, or a folder or any entry in it, was last modified, seconds since 1970."""

    @abstractmethod
    def changed(self, path: str) -> float:
        """When a file, or a folder itself (not its entries), was made or changed, seconds since 1970."""

    @abstractmethod
    def touch(self, path: str) -> None:
        """Set the modification time of a file to now, by the clock of the storage; raises FileNotFoundError."""

    # Properties of a folder

    @abstractmethod
    def try_folder(self, path: str, name: str) -> float:
        """Create a small file in a folder and delete it; raises the error that a save would get there.

        Returns the file's creation time by the clock of the storage, seconds since 1970.
        """

    def check_puts(self, path: str, name: str) -> None:
        """Before the first attempt below a folder: raise if `put_new` would replace a file there.

        Args:
            path: the folder
            name: of a file to try it with, which no other process uses
        """

    def free_bytes(self, path: str) -> int | None:
        """Bytes that this process can still write below a folder, which need not exist yet; None if unknown."""
        return None

    def in_memory(self, path: str) -> bool:
        """Whether a folder's files are kept only in memory; False if that is unknown."""
        return False

    def device(self, path: str) -> int:
        """A number for the device that a folder is on."""
        return 0

    def here(self, path: str) -> str:
        """The path on this host, where each host has its own folder; else the same path."""
        return path


class LocalFolders(Storage):
    """A storage whose folders are on this host, at least a part of each, where they can be locked."""

    @abstractmethod
    def open_folder(self, path: str) -> int:
        """Open a folder to lock it; closing the descriptor or the end of the process releases the lock."""

    @abstractmethod
    def flock(self, fd: int, how: int) -> None:
        """Lock an open folder, which shows other processes that its owner is alive; raises ENOLCK without locks."""

    @abstractmethod
    def close_folder(self, fd: int) -> None:
        """Close a folder, and release its lock."""


def not_here(what: str) -> OSError:
    """The error of an operation that a storage does not have."""
    return OSError(errno.EOPNOTSUPP, f"this storage does not have {what}")
