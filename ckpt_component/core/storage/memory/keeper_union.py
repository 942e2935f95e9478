"""`KeeperUnion`: what several keepers have, as one storage: each file is in one of them, and all of them are listed."""

from __future__ import annotations

import errno
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from ..object_folders import FOLDER_MARK
from ..storage import Storage, StoredFile
from .keepers import Keeper, KeptFile

_Answer = TypeVar("_Answer")


class KeeperUnion(Storage):
    """See the top of this file: what reads, lists and deletes."""

    #: Which keeper has each file that was listed last, to be asked first: else reading all of them took a square.
    _holders: Mapping[str, Keeper] = MappingProxyType({})

    @abstractmethod
    def _keepers(self, path: str) -> Sequence[Keeper]:
        """All keepers that may have a path, the own one first."""

    @abstractmethod
    def _pass_over(self, keeper: Keeper, error: ConnectionError) -> None:
        """A keeper is gone: raise the error, unless its files are gone with it."""

    # Folders

    def remove_tree(self, path: str) -> None:
        paths = [file.path for file in self._listed(path)]
        if not paths:
            raise _not_found(path)
        self._delete(path, paths)

    def names(self, path: str) -> list[str]:
        below = len(path) + 1
        return sorted({file.path[below:].partition("/")[0] for file in self._listed(path)} - {FOLDER_MARK, ""})

    def exists(self, path: str) -> bool:
        return any(listed for _, listed in self._answers(path, lambda keeper: keeper.listed(path)))

    def is_folder(self, path: str) -> bool:
        return any(
            file.path != path for _, files in self._answers(path, lambda keeper: keeper.listed(path)) for file in files
        )

    # Files

    def read(self, path: str, limit: int) -> bytes:
        holder = self._holders.get(path)
        for keeper in sorted(self._keepers(path), key=lambda keeper: keeper is not holder):
            try:
                return keeper.get(path, limit)
            except FileNotFoundError:
                pass  # another keeper has it, or none
            except ConnectionError as error:
                self._pass_over(keeper, error)
        raise _not_found(path)

    def unlink(self, path: str) -> None:
        if self.size(path) is None:
            raise _not_found(path)
        self._delete(path, [path])

    def size(self, path: str) -> int | None:
        return next((file.size for file in self._listed(path) if file.path == path), None)

    def sizes(self, folder: str, names: Sequence[str]) -> dict[str, int | None]:
        found = {file.path: file.size for file in self._listed(folder)}
        return {name: found.get(os.path.join(folder, name)) for name in names}

    def files_below(self, path: str) -> Iterator[StoredFile]:
        for file in sorted(self._listed(path)):
            if os.path.basename(file.path) != FOLDER_MARK:
                yield StoredFile(file.path, file.size, 1, file.path)

    def modified(self, path: str) -> float:
        times = [file.modified for file in self._listed(path)]
        if not times:
            raise _not_found(path)
        return max(times)

    def _answers(self, path: str, ask: Callable[[Keeper], _Answer]) -> Iterator[tuple[Keeper, _Answer]]:
        """What each keeper answers. One that is gone has no files; one that is silent ends it with a TimeoutError."""
        for keeper in self._keepers(path):
            try:
                yield keeper, ask(keeper)
            except ConnectionError as error:
                self._pass_over(keeper, error)

    def _listed(self, path: str) -> list[KeptFile]:
        """The file at a path and all below it, each once."""
        files, holders = dict[str, KeptFile](), dict[str, Keeper]()
        for keeper, listed in self._answers(path, lambda keeper: keeper.listed(path)):
            for file in listed:
                files.setdefault(file.path, file)
                holders.setdefault(file.path, keeper)
        if len(holders) > 1:  # those of a folder
            self._holders = holders
        return [*files.values()]

    def _delete(self, path: str, paths: Sequence[str]) -> None:
        """Delete files at a path, or below it, from all keepers."""
        for _ in self._answers(path, lambda keeper: keeper.delete(paths)):
            pass


def _not_found(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
