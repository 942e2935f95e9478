"""Folders where there are only objects: a folder exists while it has an entry, and an empty one holds a mark."""

from __future__ import annotations

import contextlib
import errno
import os

from .storage import Storage

#: Makes an empty folder exist; `names` leaves it out.
FOLDER_MARK = ".ckpt-folder"
_MOST_REWRITTEN = 1 << 30


class ObjectFolders(Storage):
    """A storage of whole objects by name, without renames, folders or locks; what buckets and memory have in common."""

    def make_folders(self, path: str) -> None:
        if not self.is_folder(path):
            with contextlib.suppress(FileExistsError):  # another rank or run created it concurrently
                self.make_folder(path)

    def make_folder(self, path: str) -> None:
        if self.is_folder(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self.write_new(os.path.join(path, FOLDER_MARK), b"")

    def remove_folder(self, path: str) -> None:
        if self.names(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self.unlink(os.path.join(path, FOLDER_MARK))

    def exists(self, path: str) -> bool:
        return self.size(path) is not None or self.is_folder(path)

    def is_real_folder(self, path: str) -> bool:
        return self.is_folder(path)

    def append(self, path: str, data: bytes) -> None:
        try:
            before = self.read(path, _MOST_REWRITTEN)
        except FileNotFoundError:
            before = b""
        self.write_over(path, before + data)

    def touch(self, path: str) -> None:
        self.write_over(path, self.read(path, _MOST_REWRITTEN))

    def changed(self, path: str) -> float:
        return self.modified(path)
