"""`FolderKeeper`: the keeper of a folder on this host's disk, for the other hosts of a job."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from .files import FileStorage
from .memory.keepers import KeptFile, LocalPiece, ServedKeeper
from .object_folders import FOLDER_MARK
from .tree_removal import remove_if_empty


@dataclass
class _SharedDescriptors:
    """The files of a folder that are open for its readers.

    Attributes:
        files: by name
        until_closed: closes them
        readers: how many there are
    """

    files: dict[str, LocalPiece | bytes] = field(default_factory=dict)
    until_closed: ExitStack = field(default_factory=ExitStack)
    readers: int = 0


class FolderKeeper(ServedKeeper):
    """See the top of this file. A folder without files has an entry of the name `FOLDER_MARK`.

    Args:
        files: the file system
        folder: the folder
        root: the path that all hosts have for it
    """

    def __init__(self, files: FileStorage, folder: str, root: str) -> None:
        self._fs = files
        self._folder = folder
        self._root = root
        self._lock = files.outside.lock()
        self._open: dict[str, _SharedDescriptors] = {}

    @property
    def nbytes(self) -> int:
        return 0

    def listed(self, prefix: str) -> list[KeptFile]:
        return [*self._below(self._here(prefix or self._root), prefix or self._root)]

    def _below(self, here: str, path: str) -> Iterator[KeptFile]:
        """What is at `here`, which is `path` for others. What is deleted meanwhile is not there."""
        with contextlib.suppress(FileNotFoundError):
            if not self._fs.is_real_folder(here):
                file = self._fs.file_at(here)
                if file is not None:
                    yield KeptFile(path, file.size, self._fs.changed(here))
                return
            names = self._fs.names(here)
            if not names and path != self._root:
                yield KeptFile(os.path.join(path, FOLDER_MARK), 0, self._fs.changed(here))
            for name in names:
                yield from self._below(os.path.join(here, name), os.path.join(path, name))

    def get(self, path: str, limit: int) -> bytes:
        return self._fs.read(self._here(path), limit)

    def put(self, path: str, data: bytes, *, new: bool = True) -> None:
        here = self._here(path)
        if new and self._fs.exists(here):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._fs.make_folders(os.path.dirname(here))
        self._fs.write_over(here, data)

    def delete(self, paths: Sequence[str]) -> None:
        """See the base class; with the folders that are empty then. Durable at return."""
        folders = set[str]()
        for here in map(self._here, paths):
            folders.add(os.path.dirname(here))
            if os.path.basename(here) != FOLDER_MARK:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.unlink(here)
        for folder in sorted(folders, key=len, reverse=True):
            self._remove_empty(folder)

    def _remove_empty(self, folder: str) -> None:
        while folder != self._folder:
            remove_if_empty(self._fs, folder)
            if self._fs.exists(folder):
                break
            folder = os.path.dirname(folder)
        with contextlib.suppress(FileNotFoundError):
            self._fs.sync_folder(folder)

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[Mapping[str, LocalPiece | bytes]]:
        """See the base class. Its readers share what is open: the first one opens it, and the last one closes it."""
        with self._lock:
            opened = self._open.get(folder)
            if opened is None:
                opened = self._open[folder] = self._opened(folder)
            opened.readers += 1
        try:
            yield opened.files
        finally:
            with self._lock:
                opened.readers -= 1
                if not opened.readers:
                    del self._open[folder]
                    opened.until_closed.close()

    def _opened(self, folder: str) -> _SharedDescriptors:
        here, opened = self._here(folder), _SharedDescriptors()
        with ExitStack() as until_closed:
            for name in self._fs.names(here):
                path = os.path.join(here, name)
                if self._fs.file_at(path) is not None:
                    fd = self._fs.open_to_serve(path)
                    until_closed.callback(os.close, fd)
                    opened.files[name] = LocalPiece(fd, 0, os.fstat(fd).st_size)
            opened.until_closed = until_closed.pop_all()
        return opened

    def _here(self, path: str) -> str:
        """Where a path is. Raises PermissionError if it is outside of the folder."""
        if os.path.normpath(path) != path or not f"{path}/".startswith(f"{self._root}/"):
            raise PermissionError(errno.EACCES, f"not in {self._root}", path)
        return self._folder + path[len(self._root) :]
