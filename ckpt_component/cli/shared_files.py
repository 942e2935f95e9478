"""Files that several checkpoints share: their bytes are verified once, and damage in one is damage in all of them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property

from ..core.storage.locate import is_url
from ..core.storage.storage import Storage, StoredFile
from ..formats.checkpoints import Root
from ..formats.rank_index import StoredRange
from .usage import files_in, usage_of


class SharedFiles:
    """The files of a checkpoint that other paths lead to as well. In a bucket there are none.

    Args:
        fs: the storage
        folder: folder of the files
        names: names of the checkpoint's files
    """

    def __init__(self, fs: Storage, folder: str, names: Iterable[str]) -> None:
        self._files: dict[str, tuple[StoredFile, float]] = {}
        for name in () if is_url(folder) else names:
            file = fs.file_at(os.path.join(folder, name))
            if file is not None and file.paths > 1:
                with suppress(FileNotFoundError):  # deleted just now
                    self._files[name] = file, fs.changed(file.path)

    @property
    def nbytes(self) -> int:
        """Bytes that deleting the checkpoint would not free."""
        return usage_of(file for file, _ in self._files.values()).shared

    def get(self, name: str) -> StoredFile | None:
        """The file of this name, if it is shared."""
        return self._files[name][0] if name in self._files else None

    def bytes_of(self, item: StoredRange) -> Hashable | None:
        """Equal for the same bytes of the same file with the same checksum; None: the file is not shared."""
        if item.file not in self._files:
            return None
        file, changed = self._files[item.file]
        return file.identity, file.size, changed, item.offset, item.length, item.checksum_kind, item.checksum


class CheckpointsOfFiles:
    """Which checkpoints files are part of. They are listed when that is first needed.

    Args:
        checkpoints: storages and paths; all others beside them in their folders are looked at too
    """

    def __init__(self, checkpoints: Iterable[tuple[Storage, str]]) -> None:
        self._given = [*checkpoints]

    def others(self, file: StoredFile, path: str) -> list[str]:
        """The paths of the checkpoints that a file is part of, besides the one at a path, in order."""
        return sorted(self._paths.get(file.identity, set()) - {path})

    @cached_property
    def _paths(self) -> Mapping[Hashable, set[str]]:
        given = {path: fs for fs, path in self._given if not is_url(path)}
        beside = {os.path.dirname(path): fs for path, fs in given.items()}
        for folder, fs in beside.items():
            given |= dict.fromkeys(Root(fs, folder).paths.values(), fs)
        found = defaultdict[Hashable, set[str]](set)
        for path, fs in given.items():
            for file in files_in(fs, path):
                found[file.identity].add(path)
        return found
