"""The hardware, measured in turn with a row's own saves and loads.

The speed of a disk varies by a factor of two or three within minutes, more than the differences between rows. So the
limits are measured in turn with the row, not before or after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from types import TracebackType

from .limits import checksums
from .raw import block_of, copy, median, read_files, write
from .target_files import drop_cache, files_of, fill_cache

#: Name, threads, and whether to bypass the page cache. Which is fastest depends on the disk.
_WAYS = (("raw_write_2", 2, False), ("raw_direct_2", 2, True), ("raw_direct_4", 4, True))


class RawSaves:
    """Copies and writes as many bytes as a state has, in turn with its saves. A context manager that owns the memory.

    Args:
        nbytes: size of the state
        folder: where files are written; they are removed after each turn
    """

    def __init__(self, nbytes: int, folder: str) -> None:
        self._nbytes = nbytes
        self._folder = folder
        self._seconds: dict[str, list[float | None]] = {}

    def turn(self) -> None:
        """Run each copy and write once."""
        self._seconds.setdefault("raw_copy", []).append(copy(self._source, self._target))
        for name, threads, direct in _WAYS:
            took = write(self._source, self._nbytes, self._folder, threads, direct=direct)
            self._seconds.setdefault(name, []).append(took)

    def figures(self) -> dict[str, float | None]:
        """`raw_copy`, `raw_write_2`, `raw_direct_2`, `raw_direct_4`: seconds, medians of the turns.

        The fastest is not chosen here, because the minimum of several noisy figures would be biased.
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
    """Load a checkpoint several times, in turn with plain reads of its files.

    Args:
        load: loads the checkpoint and returns the seconds it took
        path: the checkpoint
        turns: returns an iterable with one value per turn
        cold: whether cold reads can be distinguished from cached ones here
        raw: name of the checksum computed during plain reads; None: no plain reads

    Returns:
        `load_cold`, `load_warm`, and with `raw` also `raw_read_cold` and `raw_read_warm`: median seconds; None where
        cold and warm reads cannot be distinguished.
    """
    paths = list(files_of(path))
    figures: dict[str, float | None] = {}
    target = block_of(sum(map(os.path.getsize, paths)) if raw is not None else 1)
    if cold:
        # At the first read, a virtual machine gets memory for its page cache from its host, which takes longer than
        # the disk. No figure should include that.
        fill_cache(path)
    for cache, prepare in (("cold", drop_cache), ("warm", fill_cache)):
        loads, reads = [], []
        for _ in turns() if cold or cache == "warm" else ():
            prepare(path)
            loads.append(load())
            if raw is not None:
                prepare(path)
                reads.append(read_files(paths, target, checksums()[raw]))
        figures[f"load_{cache}"] = median(loads)
        if raw is not None:
            figures[f"raw_read_{cache}"] = median(reads)
    return figures
