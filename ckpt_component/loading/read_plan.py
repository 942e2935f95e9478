"""Who reads which bytes of files that several ranks want, and who else gets them. A pure function: no I/O.

Each file is cut by a grid. What the ranks want of a cell is a batch: one rank reads it, and every other rank gets the
bytes of it which that rank wants.

Each rank has a quota: its part of all bytes, less what it alone wants and therefore reads anyway. Batch by batch, that
rank reads which has used the smallest part of its quota, so all read at the same time, near each other in the files.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

#: By file: what is wanted of it, as ranges (start, end) in order, without overlaps.
Wanted = Mapping[str, Sequence[tuple[int, int]]]

#: Most bytes of a batch, and least ones of a cell of the grid, which page-aligned reads suit. Passing a batch on takes
#: as much time of processors as about 1 MB of its bytes, so few large ones are better.
MOST_BYTES, LEAST_BYTES = 23 << 18, 64 << 10
#: A rank has at least so many cells, as far as they are not too small: it reads at most a part of them too much.
_CELLS_OF_RANK = 20


class Stretch(NamedTuple):
    """A range of a file that the same ranks want.

    Attributes:
        start: where it begins in the file
        end: where it ends
        ranks: who wants it, in order
    """

    start: int
    end: int
    ranks: tuple[int, ...]


class Batch(NamedTuple):
    """What is read at once of a file, and served.

    Attributes:
        file: the file
        stretches: what is wanted there, in order, within `MOST_BYTES`
        reader: the rank that reads it
    """

    file: str
    stretches: tuple[Stretch, ...]
    reader: int

    @property
    def nbytes(self) -> int:
        """How many bytes are read."""
        return _nbytes(self.stretches)

    @property
    def ranks(self) -> list[int]:
        """Who wants some of it, in order."""
        return sorted({rank for stretch in self.stretches for rank in stretch.ranks})

    def part_of(self, rank: int) -> Iterator[tuple[int, int, int, int]]:
        """What a rank gets of it: all of it if the rank reads it, else what it wants.

        Yields:
            Start and end in the file, place in what is read, and number of each such stretch.
        """
        place = 0
        for number, (start, end, ranks) in enumerate(self.stretches):
            if rank == self.reader or rank in ranks:
                yield start, end, place, number
            place += end - start


def plan_reads(wants: Mapping[int, Wanted]) -> list[Batch]:
    """Plan reads such that each byte is read once, by ranks that read about equally much.

    No rank reads more than a cell above the larger of two: what it alone wants, and the average of all ranks.

    Args:
        wants: by rank, in order of the ranks: what it wants. Each of these ranks can read all the files.

    Returns:
        The batches by file and place, the same on all ranks that have the same `wants`.
    """
    files = _stretches(wants)
    total = sum(map(_nbytes, files.values()))
    even = -(-total // max(len(wants), 1))
    cell = min(max(even // _CELLS_OF_RANK // LEAST_BYTES, 1) * LEAST_BYTES, MOST_BYTES)
    cells = [(name, batch) for name in sorted(files) for batch in _cells(files[name], cell)]
    return _shared_out(cells, [*wants], even)


def _stretches(wants: Mapping[int, Wanted]) -> dict[str, list[Stretch]]:
    """What is wanted of each file, and by whom. Ranks that want the same, such as replicas, are treated as one."""
    alike: dict[tuple[tuple[str, tuple[tuple[int, int], ...]], ...], list[int]] = defaultdict(list)
    for rank, wanted in wants.items():
        alike[tuple((name, tuple(ranges)) for name, ranges in sorted(wanted.items()))].append(rank)
    groups = [*alike.values()]
    changes: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for group, files in enumerate(alike):
        for name, ranges in files:
            for place in itertools.chain.from_iterable(ranges):
                changes[name][place] ^= {group}  # where a range ends and the next one begins, nothing changes
    ranks_of: dict[frozenset[int], tuple[int, ...]] = {frozenset(): ()}
    found = dict[str, list[Stretch]]()
    for name, places in changes.items():
        found[name], now = [], frozenset[int]()
        for start, end in itertools.pairwise(sorted(places)):
            now ^= places[start]
            if now not in ranks_of:
                ranks_of[now] = tuple(sorted(itertools.chain.from_iterable(map(groups.__getitem__, now))))
            if now:
                found[name].append(Stretch(start, end, ranks_of[now]))
    return found


def _cells(stretches: Sequence[Stretch], cell: int) -> Iterator[tuple[Stretch, ...]]:
    """The stretches of each cell of the grid that has some, cut at its bounds."""
    cut = (
        Stretch(max(start, number * cell), min(end, (number + 1) * cell), ranks)
        for start, end, ranks in stretches
        for number in range(start // cell, -(-end // cell))
    )
    for _, inside in itertools.groupby(cut, key=lambda each: each.start // cell):
        yield tuple(inside)


def _shared_out(cells: Sequence[tuple[str, tuple[Stretch, ...]]], ranks: Sequence[int], even: int) -> list[Batch]:
    """The batches, each with its reader."""
    quotas = dict.fromkeys(ranks, even)
    for _, stretches in cells:
        if (only := _only_rank(stretches)) is not None:
            quotas[only] -= _nbytes(stretches)
    choice = _LeastUsed(quotas)
    batches = []
    for name, stretches in cells:
        reader = _only_rank(stretches)
        if reader is None:
            # Who wants it need not be sent it. Only if those have read enough, another rank does.
            wanting = {each.ranks: None for each in stretches}
            reader, has_enough = choice.among(tuple(sorted({*itertools.chain.from_iterable(wanting)})))
            if has_enough:
                reader, _ = choice.among(tuple(ranks))
            choice.used[reader] += _nbytes(stretches)
        batches.append(Batch(name, stretches, reader))
    return batches


class _LeastUsed:
    """Finds the rank that has used the smallest part of its quota.

    Args:
        quotas: bytes that each rank is to read; what is not above 0 is used up

    Attributes:
        used: bytes that each rank reads so far, which only grow
    """

    def __init__(self, quotas: Mapping[int, int]) -> None:
        self._quotas = quotas
        self.used = dict.fromkeys(quotas, 0)
        #: By the ranks to choose from: a heap of them, by the part that was used when they were put there.
        self._heaps: dict[tuple[int, ...], list[tuple[float, int]]] = {}

    def among(self, ranks: tuple[int, ...]) -> tuple[int, bool]:
        """The rank, of these, and whether it has used up its quota."""
        if ranks not in self._heaps:
            self._heaps[ranks] = sorted((self._part(rank), rank) for rank in ranks)
        heap = self._heaps[ranks]
        while (now := self._part(heap[0][1])) != heap[0][0]:
            heapq.heapreplace(heap, (now, heap[0][1]))
        return heap[0][1], now >= 1

    def _part(self, rank: int) -> float:
        quota = self._quotas[rank]
        return self.used[rank] / quota if quota > 0 else math.inf


def _only_rank(stretches: Sequence[Stretch]) -> int | None:
    """The rank that alone wants all of these; None: there are several."""
    first = stretches[0].ranks
    return first[0] if len(first) == 1 and all(stretch.ranks == first for stretch in stretches) else None


def _nbytes(stretches: Sequence[Stretch]) -> int:
    return sum(end - start for start, end, _ in stretches)
