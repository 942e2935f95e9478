"""`FileStorage`: the storage of a local or mounted file system.

It is production code and the hook for fault injection (`failpoint_fs` counts calls and fails or stops at the n-th).
Nothing else in the package writes, renames or deletes a checkpoint's files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import signal
import stat
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .new_names import new_path
from .safe_open import kind_of, open_regular, read_regular
from .storage import Held, LocalFolders, Storage, StoredFile
from .tree_removal import named, remove_tree

if TYPE_CHECKING:
    from .open_files import OpenFiles

#: Environment variable: which operations fail, and how; see `failpoints`.
FAILPOINT = "CKPT_FAILPOINT"
#: Environment variable: the file in which all processes record their operations.
FAILPOINT_LOG = "CKPT_FAILPOINT_LOG"


logger = logging.getLogger("ckpt_component.storage")


def is_open_elsewhere(path: str) -> bool:
    """Whether another descriptor or mapping of a file exists on this host; True where that cannot be found out.

    Raises:
        OSError: the file cannot be opened
    """
    fd = open_regular(path)
    try:
        # Who opens the file before the lease is given back waits for that, and this process gets a signal: by default
        # SIGIO, which would end it.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError as error:  # another user's file, or a file system without leases, such as NFS
        logger.info("it is unknown whether %s is open elsewhere (%s)", path, error)
        return True
    finally:
        os.close(fd)
    return False


#: Linux takes at most this many buffers in one vectored write (IOV_MAX).
_MAX_BUFFERS = 1024

#: Errors of `link` on file systems without hard links: mounted object stores, FAT, some FUSE.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
#: Errors of a link to an open file: as above, or it is on another file system, no path leads to it, or too many do.
_NO_SHARE = _NO_LINKS | {errno.EXDEV, errno.EMLINK, errno.ENOENT}
#: Errors of `copy_file_range` between two file systems, or on one without it.
_NO_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_COPY_BYTES = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: Of renameat2(2).
_NOREPLACE, _EXCHANGE, _AT_FDCWD = 1, 2, -100


class FileStorage(LocalFolders):
    """Folders and files. With `atomic_rename=False`, for mounted object stores, nothing is renamed."""

    #: The system call behind `write`; it may write fewer bytes than given.
    _pwritev: Callable[[int, Sequence[memoryview], int], int] = staticmethod(os.pwritev)

    @property
    def has_direct_io(self) -> bool:
        # A mounted object store stores a file when it is closed, so it cannot be opened a second time.
        return self.atomic_rename

    def make_folders(self, path: str) -> None:
        missing = []
        while not self.is_folder(path):
            missing.append(path)
            path = os.path.dirname(path)
        self.sync_entry(path)
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another rank or run created it concurrently
                self.make_folder(folder)
            self.sync_folder(os.path.dirname(folder))

    def sync_entry(self, path: str) -> None:
        parent = os.path.dirname(path) or "."
        if self.device(parent) == self.device(path):  # else it is a mount point
            with contextlib.suppress(PermissionError):  # the parent belongs to another user
                self.sync_folder(parent)

    def make_folder(self, path: str) -> None:
        os.mkdir(path)

    def create(self, path: str, size: int = 0) -> int:
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
            OSError: also if the source is too short
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
        # Linux starts the writeback of dirty pages when they are advised as no longer needed.
        if self.durable:
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)

    def open_direct(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)

    def open_over(self, path: str) -> int:
        """Create or truncate a file for writing; returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def open_again(self, path: str) -> int:
        """Open a file to read ranges of it, and to change them by `write`; returns its descriptor."""
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def open_to_serve(self, path: str) -> int:
        """Open a regular file, for those to whom its descriptor is sent; raises as `open_regular`."""
        return open_regular(path)

    def open_append(self, path: str) -> int:
        """Open a file for `write` at its end, whatever the offset says, and create it if necessary."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def link(self, source: str, target: str) -> None:
        """Hard-link a file to a second name; raises FileExistsError if that exists."""
        os.link(source, target, follow_symlinks=False)

    def hold(self, path: str) -> Held | None:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def read_held(self, held: Held, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(int(held), [buffer[done:]], offset + done)
            if not count:
                raise OSError(errno.EIO, f"the file ends at {offset + done}, and more was expected")
            done += count

    def release(self, held: Held) -> None:
        os.close(int(held))

    def share(self, held: Held, path: str) -> bool:
        held = int(held)
        try:
            # With `src_dir_fd`, which an absolute path does not use, Python follows the link of /proc to the file.
            os.link(f"/proc/self/fd/{held}", path, src_dir_fd=held, follow_symlinks=True)
        except OSError as error:
            if error.errno not in _NO_SHARE:
                raise
        else:
            self.sync(held)  # another run may have written it without
            return True
        size = os.fstat(held).st_size
        with self.durable_at_end(self.create(path, size)) as fd:
            self.copy(fd, held, 0, size)
        return False

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def drop_cached(self, fd: int) -> None:
        if self.durable:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync(self, fd: int) -> None:
        if self.durable:
            os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def open_files(self, folder: str, *, shared: bool = True) -> OpenFiles:
        from .open_files import OpenFiles  # processes that only write do not load it

        return OpenFiles(folder, shared=shared, outside=self.outside)

    def append(self, path: str, data: bytes) -> None:
        fd = self.open_append(path)
        try:
            self.write(fd, [memoryview(data)], 0)
        finally:
            self.close(fd)

    def put_new(self, path: str, data: bytes, draft: str) -> None:
        # Without hard links, the exclusive creation is the conditional put of a mounted object store.
        try:
            self.link(draft, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self.write_new(path, data)

    def write_over(self, path: str, data: bytes) -> None:
        if not self.atomic_rename:
            if self.size(path) is None and self.exists(path):
                self.unlink(path)  # replace a link or a FIFO instead of writing through it
            with self.durable_at_end(self.open_over(path)) as fd:  # an object store makes it visible at the close
                self.write(fd, [memoryview(data)], 0)
        else:
            fresh = new_path(path, self.outside)  # another process may be replacing it at the same time
            try:
                self.write_new(fresh, data)
                self.replace(fresh, path)
            except BaseException:
                with contextlib.suppress(OSError):  # the first error is the one to report
                    self.unlink(fresh)
                raise
        self.sync_folder(os.path.dirname(path))

    def sync_folder(self, path: str) -> None:
        if not self.durable:
            return
        fd = os.open(path, _FOLDER)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename_new(self, source: str, target: str) -> bool:
        """Rename; raises FileExistsError if `target` exists, even as an empty folder.

        Returns:
            False where the check and the rename are two steps.
        """
        # A plain rename silently replaces an empty folder.
        if _rename_by(_NOREPLACE, source, target):
            return True
        try:
            if not os.path.lexists(target):
                os.rename(source, target)
                return False
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # of a folder that a cache of NFS did not know
                raise
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)

    def exchange(self, one: str, other: str) -> None:
        """Exchange the names of two files or folders in one step; on file systems without that, in three."""
        if not _rename_by(_EXCHANGE, one, other):
            between = f"{one}.between"
            os.rename(other, between)
            os.rename(one, other)
            os.rename(between, one)

    def replace(self, source: str, target: str) -> None:
        """Rename over an existing file, atomically."""
        os.replace(source, target)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        """Delete one file; `dir_fd`: its folder, which is open."""
        with named(path):
            os.unlink(_name_in(path, dir_fd), dir_fd=dir_fd)

    def remove_folder(self, path: str, *, dir_fd: int | None = None) -> None:
        """Delete one empty folder; `dir_fd`: the folder that it is in, which is open."""
        with named(path):
            os.rmdir(_name_in(path, dir_fd), dir_fd=dir_fd)

    def remove_tree(self, path: str) -> None:
        remove_tree(self, path)

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def is_real_folder(self, path: str) -> bool:
        return os.path.isdir(path) and not os.path.islink(path)

    def size(self, path: str) -> int | None:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def file_at(self, path: str) -> StoredFile | None:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return StoredFile(path, status.st_size, status.st_nlink, (status.st_dev, status.st_ino))

    def try_folder(self, path: str, name: str) -> float:
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
        return kind_of(path) in ("tmpfs", "ramfs")

    def read(self, path: str, limit: int) -> bytes:
        return read_regular(path, limit)

    def read_again(self, path: str, limit: int) -> bytes:
        return read_regular(path, limit, cached=False)

    def touch(self, path: str) -> None:
        os.utime(path)

    def modified(self, path: str) -> float:
        status = os.lstat(path)
        times = [status.st_mtime]
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(path) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # deleted just now
                        times.append(entry.stat(follow_symlinks=False).st_mtime)
        return max(times)

    def changed(self, path: str) -> float:
        return os.lstat(path).st_mtime

    def device(self, path: str) -> int:
        return os.stat(path).st_dev

    def identity(self, path: str) -> tuple[int, int]:
        """What two paths of one file have in common, and no other file has while it exists."""
        status = os.stat(path)
        return status.st_dev, status.st_ino

    def is_open_elsewhere(self, path: str) -> bool:
        """Whether another descriptor or mapping of a file exists on this host; True where that is unknown."""
        pass  # which only receivers of published weights need

        return is_open_elsewhere(path)

    def open_folder(self, path: str) -> int:
        return os.open(path, _FOLDER)

    def flock(self, fd: int, how: int) -> None:
        fcntl.flock(fd, how)

    def close_folder(self, fd: int) -> None:
        os.close(fd)


def local_files(storage: Storage) -> FileStorage | None:
    """The storage itself if it is of files, which it can also rename, copy and lock; else None."""
    return storage if isinstance(storage, FileStorage) else None


def _name_in(path: str, dir_fd: int | None) -> str:
    return path if dir_fd is None else os.path.basename(path)


def _rename_by(flag: int, source: str, target: str) -> bool:
    """Rename in one step by renameat2(2); False where the file system or the C library does not have it or the flag.

    Args:
        flag: `_NOREPLACE`: fail if the target exists; `_EXCHANGE`: exchange the two names
        source: a path
        target: the other path

    Raises:
        OSError: the rename failed
    """
    from ..libc import get_errno, renameat2  # 5 ms, and only a commit needs it

    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    code = get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), source, None, target)
