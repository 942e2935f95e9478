"""Delete a folder and everything in it, by descriptors of the folders.

By path, one who renames in the folder at the same time, and puts a link there, would have files elsewhere deleted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from ..outside import Outside
from .new_names import NEW_PREFIX

if TYPE_CHECKING:
    from .storage import Storage

#: An NFS client renames a file that is deleted while it is open, and closes files in the background.
_OPEN = ".nfs"
_CLOSE_SECONDS, _CLOSE_PAUSE = 1.0, 0.01
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Deletes(Protocol):
    """Deletes by the name in an open folder; waits by `outside`."""

    outside: Outside

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        """Delete one file; `dir_fd`: its folder, which is open."""

    def remove_folder(self, path: str, *, dir_fd: int | None = None) -> None:
        """Delete one empty folder; `dir_fd`: the folder that it is in, which is open."""


def remove_if_empty(storage: Storage, folder: str) -> None:
    """Delete a folder in which is nothing, or only what a killed process was about to put there."""
    try:
        storage.remove_folder(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
        names = storage.names(folder) if error.errno != errno.ENOENT else []
        if names and all(name.startswith(NEW_PREFIX) for name in names):
            for name in names:
                storage.unlink(os.path.join(folder, name))
            storage.remove_folder(folder)


def remove_tree(storage: Deletes, path: str) -> None:
    """Delete a folder and everything in it; of a link, the link. See `Storage.remove_tree`."""
    parent = os.open(os.path.dirname(path), _FOLDER)
    try:
        _remove(storage, parent, path)
    finally:
        os.close(parent)


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """Have an OSError name the whole path, where the system call had only a part of it."""
    try:
        yield
    except OSError as error:
        error.filename = path
        raise


def _remove(storage: Deletes, parent: int, path: str) -> None:
    name = os.path.basename(path)
    with named(path):
        if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            storage.unlink(path, dir_fd=parent)
            return
        folder = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    try:
        deadline = storage.outside.now() + _CLOSE_SECONDS
        while True:
            _empty(storage, folder, path)
            try:
                storage.remove_folder(path, dir_fd=parent)
                return
            except OSError:
                is_open = [name.startswith(_OPEN) for name in os.listdir(folder)]
                if not is_open or not all(is_open) or storage.outside.now() > deadline:
                    raise
            storage.outside.sleep(_CLOSE_PAUSE)
    finally:
        os.close(folder)


def _empty(storage: Deletes, folder: int, path: str) -> None:
    """Delete everything in an open folder."""
    with os.scandir(folder) as entries:
        children = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in children:
        child = os.path.join(path, name)
        if is_folder:
            _remove(storage, folder, child)
            continue
        try:
            storage.unlink(child, dir_fd=folder)
        except OSError as error:  # a deleted file that NFS keeps until it is closed
            if error.errno != errno.EBUSY or not name.startswith(_OPEN):
                raise
