"""Open the files of a checkpoint safely: regular files only.

A link could lead out of the folder, a FIFO would block, a device may do anything. Hard links are accepted: `cp -al` and
`rsync --link-dest` create them, and they can only name files that the reader may open anyway.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from ...errors import CheckpointCorruptError, CheckpointUnreadableError

#: Local file systems. Network file systems need more read-ahead than a few blocks.
_ON_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs"})


def kind_of(path: str) -> str:
    """The kernel's name of the file system, such as `ext4` or `tmpfs`; "" if unknown.

    Raises:
        OSError: `path` does not exist
    """
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                mount, _, kind = line.partition(" - ")
                if mount.split()[2:3] == [number]:
                    return kind.partition(" ")[0]
    except OSError:
        return ""  # /proc is missing or not readable
    return ""


def is_on_disk(folder: str) -> bool:
    """Whether a folder is on a local disk, judged by its file system's name. Raises as `kind_of`."""
    return kind_of(folder) in _ON_DISK


#: Errors of `open` for something other than a regular file: a link (O_NOFOLLOW), a socket.
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO)
#: How often to read a small file that another client of NFS keeps replacing: what is open becomes stale.
_READS = 10

#: What is logged when the second answer is right.
READ_TWICE = (
    "%s did not match the checksum taken at the save, and does now that it was read again: the stored bytes are whole, "
    "but the network, the disk or the memory of this host returned wrong ones"
)


def open_regular(path: str) -> int:
    """Open a regular file for reading, without following a link and without ever blocking.

    Returns:
        A descriptor, owned by the caller.

    Raises:
        NotRegularError: the path is a link, a FIFO, a device, a socket or a folder
        OSError: the file cannot be opened
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer. Regular files ignore it.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise NotRegularError(path) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotRegularError(path)
    except OSError:
        os.close(fd)
        raise
    return fd


def forget(fd: int, offset: int = 0, length: int = 0) -> None:
    """Drop a range of a file from the page cache, 0 bytes: to its end; only advice, as dirty pages stay."""
    with contextlib.suppress(OSError):  # file systems without a page cache of their own
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def read_regular(path: str, limit: int, *, cached: bool = True) -> bytes:
    """Read a small file, as it is on the server although another client of NFS replaced it.

    Args:
        path: the file
        limit: most bytes that it may have
        cached: it may come from the page cache

    Raises:
        NotRegularError: as `open_regular`
        OSError: the file cannot be read, or is larger
    """
    folder = os.path.dirname(path) or "."
    for reads_left in reversed(range(_READS)):
        try:
            # A client opens the file that it knows by this name until it asks the server whether the folder changed,
            # for which the folder is opened. If it may not be listed, the cache has to do.
            with contextlib.suppress(PermissionError):
                os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            with os.fdopen(open_regular(path), "rb") as stream:
                if not cached:
                    forget(stream.fileno())
                data = stream.read(limit + 1)
            break
        except OSError as error:
            if error.errno != errno.ESTALE or not reads_left:
                raise
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than the {limit} bytes allowed for this file", path)
    return data


def open_past_cache(fd: int) -> int:
    """Open an already open file again for direct I/O, which reads whole pages past the page cache.

    Args:
        fd: descriptor of the file. The same file is opened even if its name now refers to another.

    Returns:
        A descriptor, owned by the caller.

    Raises:
        OSError: the file system has no direct I/O, or /proc is missing
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)


def open_to_read(fd: int) -> int:
    """Open an open file or memfd once more, for reading alone; returns a descriptor, owned by the caller."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


class NotRegularError(OSError):
    """A path of a checkpoint's file is not a regular file."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "it is not a regular file (a link, a folder, a FIFO or a device)", path)


def is_plain_name(name: object) -> bool:
    """Whether a value is a valid name of an entry directly in a folder, so that it cannot lead out of it."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(os.fsencode(name)) <= 255
    except UnicodeEncodeError:
        return False


def place_of(folder: str, name: str) -> tuple[str, str]:
    """The folder and the name under which a file can be opened; other than the given ones for a link to a blob.

    The cache of the Hugging Face Hub has `snapshots/REVISION/NAME` as links to `../../blobs/HASH`. No other link may be
    followed.
    """
    if "://" not in folder and os.path.islink(os.path.join(folder, name)):
        revisions, revision = os.path.split(os.path.realpath(folder))
        blobs = os.path.join(os.path.dirname(revisions), "blobs")
        *parents, blob = os.readlink(os.path.join(folder, name)).split("/")
        of_hub = os.path.basename(revisions) == "snapshots" and parents == ["..", "..", "blobs"]
        if of_hub and revision and is_plain_name(blob) and not os.path.islink(blobs):
            return blobs, blob
    return folder, name


def read_failure(path: str, error: OSError) -> CheckpointCorruptError:
    """Convert a failed open or read of a checkpoint's file into the error to raise.

    A file that is missing or not a regular file means that the checkpoint is damaged. A failed device, mount or
    permission check says nothing about the bytes, which may be readable later.
    """
    if isinstance(error, NotRegularError) or error.errno in (errno.ENOENT, errno.EFBIG, errno.ENAMETOOLONG):
        return CheckpointCorruptError(f"{path} cannot be read: {error.strerror}.")
    return CheckpointUnreadableError(f"{path} cannot be read: {error.strerror or error}.", error.errno)
