"""The hardware, measured in turn with a row's own saves and loads.

A disk's speed wanders by a factor of two or three within minutes, which is more than what is compared: a limit that was
measured in another minute says little of a row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from types import TracebackType

from .files import drop_cache, files_of, fill_cache
from .limits import checksums
from .raw import block_of, copy, median, read_files, write

#: Name, threads, and whether past the page cache: what is the fastest differs from disk to disk.
_WAYS = (("raw_write_2", 2, False), ("raw_direct_2", 2, True), ("raw_direct_4", 4, True))


class RawSaves:
    """Copies and writes as many bytes as a state has, in turn with its saves. A context manager, which has the memory.

    Args:
        nbytes: of the state.
        folder: where files are written; it is as it was after each turn.
    """

    def __init__(self, nbytes: int, folder: str) -> None:
        self._nbytes = nbytes
        self._folder = folder
        self._seconds: dict[str, list[float | None]] = {}

    def turn(self) -> None:
        """Do each once."""
        self._seconds.setdefault("raw_copy", []).append(copy(self._source, self._target))
        for name, threads, direct in _WAYS:
            took = write(self._source, self._nbytes, self._folder, threads, direct=direct)
            self._seconds.setdefault(name, []).append(took)

    def figures(self) -> dict[str, float | None]:
        """`raw_copy`, `raw_write_2`, `raw_direct_2`, `raw_direct_4`: seconds, medians of the turns.

        The fastest way is not chosen here: the least of several wandering figures is less than any of them is.
        """
        return {name: median(took) for name, took in self._seconds.items()}

    def __enter__(self) -> RawSaves:
        self._source, self._target = block_of(self._nbytes), block_of(self._nbytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._source, self._target


def measure_loads(
    load: Callable[[], float], path: str, *, turns: Callable[[], Iterable[int]], cold: bool, raw: str | None
) -> dict[str, float | None]:
    """Load a checkpoint some times, and read its files in turn with that.

    Args:
        load: loads it; returns the seconds.
        path: of the checkpoint.
        turns: gives as many values as there are to be turns.
        cold: whether cold reads can be distinguished from cached ones here.
        raw: the checksum to take of files that are merely read; None: they are not.

    Returns:
        `load_cold`, `load_warm`, and with `raw` `raw_read_cold` and `raw_read_warm`: seconds, medians; None for what
        cannot be distinguished.
    """
    paths = list(files_of(path))
    found: dict[str, float | None] = {}
    target = block_of(sum(map(os.path.getsize, paths)) if raw is not None else 1)
    if cold:
        # A virtual machine gets memory for its page cache from its host at the first read, which takes longer than the
        # disk: that cost is not part of any figure here.
        fill_cache(path)
    for cache, prepare in (("cold", drop_cache), ("warm", fill_cache)):
        loads, reads = [], []
        for _ in turns() if cold or cache == "warm" else ():
            prepare(path)
            loads.append(load())
            if raw is not None:
                prepare(path)
                reads.append(read_files(paths, target, checksums()[raw]))
        found[f"load_{cache}"] = median(loads)
        if raw is not None:
            found[f"raw_read_{cache}"] = median(reads)
    return found
