"""`FsOps`: all file-system operations of a save.

It is production code and the hook for fault injection (`failpoint_fs` counts calls and fails or stops at the n-th).
Nothing else in the package writes, renames or deletes a checkpoint's files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence

from .fs_type import kind_of
from .safe_open import open_regular

#: Linux takes at most this many buffers in one vectored write (IOV_MAX).
_MAX_BUFFERS = 1024

#: Errors of `link` on file systems without hard links: mounted object stores, FAT, some FUSE.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
#: Errors of `copy_file_range` between two file systems, or on one without it.
_NO_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_COPY_BYTES = 1 << 20
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class FsOps:
    """The file-system operations of a save.

    Args:
        durable: `True`: `sync` and `sync_folder` reach the disk (survives a power cut). `False`: they do nothing
            (survives only process crashes, several times faster on small saves).
        atomic_rename: whether a folder can be renamed in one step. `False`, for mounted object stores: nothing is
            renamed, checkpoints are committed by `put_new`, and files are overwritten in place.
        warns: whether to warn, once, if the file system has no locks. A writer process leaves that to its trainer.
    """

    #: The system call behind `write`; it may write fewer bytes than given.
    _pwritev: Callable[[int, Sequence[memoryview], int], int] = staticmethod(os.pwritev)

    def __init__(self, *, durable: bool = True, atomic_rename: bool = True, warns: bool = True) -> None:
        self.durable = durable
        self.atomic_rename = atomic_rename
        self.warns = warns

    def make_folders(self, path: str) -> None:
        """Create a folder and its missing parents, and make each new entry durable."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            try:
                self.make_folder(folder)
            except FileExistsError:
                continue  # another rank or run created it concurrently
            self.sync_folder(os.path.dirname(folder))

    def make_folder(self, path: str) -> None:
        """Create one folder; it is an error if it exists."""
        os.mkdir(path)

    def create(self, path: str, size: int = 0) -> int:
        """Create a file that must not exist yet and reserve `size` bytes of disk; returns its descriptor."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        if size:
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                # Some file systems cannot reserve; the write itself then reports a full disk.
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    os.close(fd)
                    raise
        return fd

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Write all `buffers` one after the other from `offset` on, and continue after short writes."""
        pending = list(buffers)
        while pending:
            written = self._pwritev(fd, pending[:_MAX_BUFFERS], offset)
            offset += written
            while pending and written >= pending[0].nbytes:
                written -= pending.pop(0).nbytes
            if written:
                pending[0] = pending[0][written:]

    def copy(self, fd: int, source: int, offset: int, length: int) -> None:
        """Copy a range of the open file `source` to the same offset of `fd`; blocks are shared where the kernel can.

        Raises:
            OSError: also if the source is too short.
        """
        end, by_kernel = offset + length, True
        while offset < end:
            if by_kernel:
                try:
                    count = os.copy_file_range(source, fd, end - offset, offset, offset)
                except OSError as error:
                    if error.errno not in _NO_COPY:
                        raise
                    count = 0
                by_kernel = count > 0  # some file systems copy nothing and report no error
            else:
                data = os.pread(source, min(end - offset, _COPY_BYTES), offset)
                if not data:
                    raise OSError(errno.EIO, f"the file ends at {offset} and {end} bytes were expected")
                self.write(fd, [memoryview(data)], offset)
                count = len(data)
            offset += count

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        """Start writing a range to disk that will be synced later. Does not wait.

        Linux starts the writeback of dirty pages when they are advised as no longer needed.
        """
        if self.durable:
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)

    def open_direct(self, path: str) -> int:
        """Open a file made by `create` a second time, for direct I/O in whole pages."""
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)

    def open_over(self, path: str) -> int:
        """Create or truncate a file for writing; returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def open_append(self, path: str) -> int:
        """Open a file for `write` at its end, whatever the offset says, and create it if necessary."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def link(self, source: str, target: str) -> None:
        """Hard-link a file to a second name; raises FileExistsError if that exists."""
        os.link(source, target, follow_symlinks=False)

    def truncate(self, fd: int, size: int) -> None:
        """Truncate a file to `size` bytes."""
        os.ftruncate(fd, size)

    def drop_cached(self, fd: int) -> None:
        """Drop the pages of a synced file from the page cache, so that they do not evict the training's data."""
        if self.durable:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync(self, fd: int) -> None:
        """Make a file's bytes durable; must be called by the process that wrote them."""
        if self.durable:
            os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor returned by `create`."""
        os.close(fd)

    def write_new(self, path: str, data: bytes, *, over: bool = False) -> None:
        """Durably write one small file: a new one, or `over` an existing one."""
        fd = self.open_over(path) if over else self.create(path)
        try:
            self.write(fd, [memoryview(data)], 0)
            self.sync(fd)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to report
                self.close(fd)
            raise
        self.close(fd)

    def put_new(self, path: str, data: bytes, draft: str) -> None:
        """Create a small file in one step; raises FileExistsError if the name is taken.

        After any other error the file may exist nevertheless; read it back to find out.

        Args:
            path: path of the file.
            data: content of the file.
            draft: a synced file with the same content, to which `path` is hard-linked where the file system can do
                that. Elsewhere `path` is created exclusively, which is the conditional put of an object store.
        """
        try:
            self.link(draft, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self.write_new(path, data)

    def write_over(self, path: str, data: bytes) -> None:
        """Durably replace one small file; readers see either the old bytes or the new ones.

        Without renames the file is overwritten in place, which an object store makes visible at the close.
        """
        fresh = f"{path}.new" if self.atomic_rename else path
        if self.size(fresh) is None and os.path.lexists(fresh):
            self.unlink(fresh)  # replace a link or a FIFO instead of writing through it
        try:
            self.write_new(fresh, data, over=True)
            if self.atomic_rename:
                self.replace(fresh, path)
        except BaseException:
            if self.atomic_rename:
                with contextlib.suppress(OSError):  # the first error is the one to report
                    self.unlink(fresh)
            raise
        self.sync_folder(os.path.dirname(path))

    def sync_folder(self, path: str) -> None:
        """Make a folder's entries durable (new, renamed and deleted names)."""
        if not self.durable:
            return
        fd = os.open(path, _FOLDER)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename_new(self, source: str, target: str) -> bool:
        """Rename; raises FileExistsError if `target` exists, even as an empty folder.

        A plain rename silently replaces an empty folder, so this uses RENAME_NOREPLACE.

        Returns:
            False on a file system without it, where the check and the rename are two steps.
        """
        if _renameat2(source, target, _RENAME_NOREPLACE):
            return True
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        os.rename(source, target)
        return False

    def exchange(self, one: str, other: str) -> None:
        """Exchange the names of two files or folders in one step; on file systems without that, in three."""
        if not _renameat2(one, other, _RENAME_EXCHANGE):
            between = f"{one}.between"
            os.rename(other, between)
            os.rename(one, other)
            os.rename(between, one)

    def replace(self, source: str, target: str) -> None:
        """Rename over an existing file, atomically."""
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        """Delete one file."""
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """Delete one empty folder."""
        os.rmdir(path)

    def remove_tree(self, path: str) -> None:
        """Delete a folder and everything in it; links are deleted, never followed."""
        if os.path.islink(path):
            self.unlink(path)
            return
        with os.scandir(path) as entries:
            children = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for child, is_folder in children:
            if is_folder:
                self.remove_tree(child)
            else:
                self.unlink(child)
        self.remove_folder(path)

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted; empty if the folder does not exist."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def is_folder(self, path: str) -> bool:
        """Whether the path is a folder or a link to one."""
        return os.path.isdir(path)

    def is_real_folder(self, path: str) -> bool:
        """Whether the path is a folder and not a link."""
        return os.path.isdir(path) and not os.path.islink(path)

    def size(self, path: str) -> int | None:
        """The size of a regular file in bytes, or None if there is none (links do not count)."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def try_folder(self, path: str, name: str) -> float:
        """Create a small file in a folder and delete it; raises the error that a save would get there.

        Returns the file's creation time by the clock of the file system, seconds since 1970.
        """
        trial = os.path.join(path, name)
        try:
            fd = self.create(trial)
            made = os.fstat(fd).st_mtime
            self.close(fd)
        finally:
            if self.size(trial) is not None:
                self.unlink(trial)
        return made

    def free_bytes(self, path: str) -> int | None:
        """Bytes that this process can still write below a folder, which need not exist yet; None if unknown."""
        while not os.path.isdir(path) and path != os.path.dirname(path):
            path = os.path.dirname(path)
        try:
            status = os.statvfs(path)
        except OSError:
            return None  # the write itself reports what is wrong with this folder
        if status.f_blocks == 0:
            return None  # some network file systems
        # Most file systems reserve a part of the disk for root.
        return status.f_frsize * (status.f_bfree if os.geteuid() == 0 else status.f_bavail)

    def in_memory(self, path: str) -> bool:
        """Whether a folder is on an in-memory file system; False if that is unknown."""
        return kind_of(path) in ("tmpfs", "ramfs")

    def read(self, path: str, limit: int) -> bytes:
        """Read a regular file of at most `limit` bytes; refuses links, FIFOs and the like."""
        fd = open_regular(path)
        with os.fdopen(fd, "rb") as stream:
            data = stream.read(limit + 1)
        if len(data) > limit:
            raise OSError(errno.EFBIG, f"larger than the {limit} bytes allowed for this file", path)
        return data

    def touch(self, path: str) -> None:
        """Set the modification time of a file to now, by the clock of the file system."""
        os.utime(path)

    def modified(self, path: str) -> float:
        """When a file, or a folder or any entry in it, was last modified, seconds since 1970."""
        status = os.lstat(path)
        times = [status.st_mtime]
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(path) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # deleted just now
                        times.append(entry.stat(follow_symlinks=False).st_mtime)
        return max(times)

    def open_folder(self, path: str) -> int:
        """Open a folder to lock it; closing the descriptor or the end of the process releases the lock."""
        return os.open(path, _FOLDER)

    def flock(self, fd: int, how: int) -> None:
        """Lock an open folder, which shows other processes that its owner is alive."""
        fcntl.flock(fd, how)


def _renameat2(source: str, target: str, flags: int) -> bool:
    """Call renameat2; returns False where the file system or the system does not have it."""
    import ctypes  # 5 ms, and only a commit needs it

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), source, None, target)
