"""`HostFiles`: the files of a folder of `HostFolders`: those of this host from its disk, others over the network."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from operator import attrgetter
from typing import IO, Any

from ..memory.scratch import ScratchBlock
from ..outside import Outside
from ..progress import Progress, no_progress
from .file_set import FileSet, RangeRead
from .memory.keepers import Keeper, Piece
from .memory.memory_files import MemoryFiles
from .safe_open import read_failure


class HostFiles(FileSet):
    """The files of a folder.

    Args:
        folder: folder of the checkpoint
        here: what this host has of it; owned
        is_here: whether a file of this name is there
        others: the other hosts, which are asked, one after the other, for what is not here
    """

    def __init__(self, folder: str, here: FileSet, is_here: Callable[[str], bool], others: Sequence[Keeper]) -> None:
        super().__init__(folder, here.outside)
        self._here = here
        self._is_here = is_here
        self._others = [*others]
        self._lock = self.outside.lock()
        #: Where the files are that were asked for, or were found beside them.
        self._places: dict[str, FileSet] = {}
        self._until_closed = ExitStack()
        self._until_closed.push(here)

    @property
    def block(self) -> ScratchBlock:
        return self._here.block

    def size(self, name: str) -> int:
        return self._place(name).size(name)

    def stream(self, name: str) -> IO[bytes]:
        return self._place(name).stream(name)

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        return self._place(name).fill(name, buffer, offset)

    def fill_block(self, name: str, offset: int, length: int) -> int | None:
        if self._place(name) is self._here:
            return self._here.fill_block(name, offset, length)
        return super().fill_block(name, offset, length)

    def read_all(
        self,
        reads: Sequence[RangeRead],
        progress: Progress = no_progress,
        *,
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
        batch_bytes: float = math.inf,
    ) -> None:
        """Read in file order, which is that of turns, and each place in the way that is best; see the base class."""
        ordered = sorted(reads, key=attrgetter("file"))
        for place, its in itertools.groupby(ordered, key=lambda read: self._place(read.file)):
            place.read_all([*its], progress, inside=inside, batch_bytes=batch_bytes)

    def _place(self, name: str) -> FileSet:
        """Where a file is; here, if nobody has it. Raises as `size`."""
        path = self._path(name)
        with self._lock:
            if name not in self._places and self._is_here(name):
                self._places[name] = self._here
            while name not in self._places and self._others:
                keeper = self._others.pop(0)
                try:
                    listed = keeper.listed(self._folder)
                except OSError as error:
                    raise read_failure(path, error) from error
                far = self._until_closed.enter_context(FarFiles(self._folder, keeper, self.outside))
                for file in listed:
                    self._places.setdefault(os.path.basename(file.path), far)
            return self._places.get(name, self._here)

    def _forget(self, name: str, offset: int, length: int) -> None:
        self._place(name)._forget(name, offset, length)

    def _choose_ways(self, ordered: Sequence[RangeRead]) -> int:
        return self._here._choose_ways(ordered)

    def __exit__(self, *exception: object) -> None:
        self._until_closed.close()
        super().__exit__(*exception)


class FarFiles(MemoryFiles):
    """The files of a folder that another host has on its disk.

    Args:
        folder: folder of the checkpoint
        keeper: of that host
        outside: that of the storage
    """

    def __init__(self, folder: str, keeper: Keeper, outside: Outside) -> None:
        super().__init__(folder, lambda: [keeper], outside)
        self._keeper = keeper

    def _open(self) -> dict[str, Piece | bytes]:
        return dict(self._until_closed.enter_context(self._keeper.opened(self._folder)))

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._keeper.forget()
