"""Opening a file of a checkpoint: a regular file under its own name, or an error; nothing else is ever opened.

A link could lead out of the folder, a FIFO would block, a device may do anything. Hard links are taken: they
are how `cp -al` and `rsync --link-dest` keep copies, and they can only name what the reader may open anyway.
"""

from __future__ import annotations

import errno
import os
import stat

from ..errors import CheckpointCorruptError, CheckpointUnreadableError

#: What an open answers for a name that is no regular file: a link (O_NOFOLLOW), a socket.
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO)


def open_regular(path: str) -> int:
    """Open a regular file for reading, without following a link and without ever blocking.

    Returns:
        A descriptor, owned by the caller.

    Raises:
        NotRegularError: it is a link, a FIFO, a device, a socket or a folder.
        OSError: it cannot be opened.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer. Regular files ignore it.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise NotRegularError(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegularError(path)
    return fd


def open_past_cache(fd: int) -> int:
    """Open a file once more, for reads of whole pages past the page cache.

    Args:
        fd: of the file: the same one is opened, whatever has its name by now.

    Returns:
        A descriptor, owned by the caller.

    Raises:
        OSError: the file system has no such reads, or there is no /proc to open it through.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)


class NotRegularError(OSError):
    """Something that is no regular file stands where a file of a checkpoint should."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "it is no regular file (a link, a folder, a FIFO or a device)", path)


def is_plain_name(name: object) -> bool:
    """Whether a text is the name of something directly in a folder, and so cannot lead out of it."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(os.fsencode(name)) <= 255
    except UnicodeEncodeError:
        return False


def read_failure(path: str, error: OSError) -> CheckpointCorruptError:
    """What a failed open or read of a file says about a checkpoint.

    A missing file, or something else in its place, is damage. A device, a mount or a permission that fails says nothing
    about the bytes, which may be all right tomorrow.
    """
    if isinstance(error, NotRegularError) or error.errno in (errno.ENOENT, errno.EFBIG, errno.ENAMETOOLONG):
        return CheckpointCorruptError(f"{path} cannot be read: {error.strerror}.")
    return CheckpointUnreadableError(f"{path} cannot be read: {error.strerror or error}.", error.errno)
