"""`TensorFiles`: the tensors in a folder of safetensors files, as bytes that are read and changed by name."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TypeVar

from ..core.storage.files import FileStorage
from ..formats import open_index
from ..formats.rank_index import StoredRange

Self = TypeVar("Self", bound="TensorFiles")


class TensorFiles:
    """The tensors of a folder. A context manager, which holds the files open; thread-safe for different tensors.

    Args:
        fs: the file system
        folder: a Hugging Face folder
        changes: whether tensors are changed, too

    Raises:
        CheckpointCorruptError: a header, or the index of several files, is damaged
        CheckpointNotFoundError: there are no weights
    """

    def __init__(self, fs: FileStorage, folder: str, *, changes: bool = False) -> None:
        self._fs, self._folder, self._changes = fs, folder, changes
        contents = open_index(fs, folder).contents
        self._places: dict[str, StoredRange] = {
            name: contents.ranges_at(entry.place)[0] for name, entry in contents.tensors.items()
        }
        self._open: dict[str, int] = {}
        self._lock = fs.outside.lock()

    @property
    def names(self) -> Collection[str]:
        """The names of the tensors."""
        return self._places.keys()

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor."""
        return self._places[name].length

    def read(self, name: str, buffer: memoryview) -> None:
        """Fill a buffer with the bytes of a tensor."""
        place = self._places[name]
        self._fs.read_held(self._descriptor(place.file), buffer, place.offset)

    def write(self, name: str, data: memoryview) -> None:
        """Change the bytes of a tensor."""
        place, fd = self._places[name], self._descriptor(self._places[name].file)
        self._fs.write(fd, [data], place.offset)
        self._fs.start_writeback(fd, place.offset, place.length)

    def copy(self, name: str, source: TensorFiles) -> None:
        """Change a tensor to what another folder with the same files has."""
        place = self._places[name]
        self._fs.copy(self._descriptor(place.file), source._descriptor(place.file), place.offset, place.length)

    def _descriptor(self, name: str) -> int:
        with self._lock:
            if name not in self._open:
                path = os.path.join(self._folder, name)
                self._open[name] = self._fs.open_again(path) if self._changes else int(self._fs.hold(path) or 0)
            return self._open[name]

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            fd = self._open.popitem()[1]
            if self._changes:
                self._fs.close(fd)
            else:
                self._fs.release(fd)
