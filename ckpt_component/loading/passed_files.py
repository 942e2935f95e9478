"""`PassedFiles`: the files of a checkpoint that several ranks read together, each byte of which one of them reads."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import IO, Any, NamedTuple

from ..core.memory import libc
from ..core.memory.scratch import ScratchBlock
from ..core.progress import Progress, no_progress
from ..core.storage.file_set import FileSet, RangeRead, extents_of
from .passing import Passing
from .read_plan import MOST_BYTES, Batch, Wanted

_MAX_THREADS = 4
#: Items are aligned to pages: what is between them is read too.
_PADDING_BYTES = 4096

#: Plans what all ranks want now, of which this rank's is given: the batches, and what passes them; None: this rank
#: reads what it wants by itself.
Plans = Callable[[Wanted], tuple[Sequence[Batch], Passing] | None]


class _ComingRange(NamedTuple):
    """A range of a file that comes with a batch.

    Attributes:
        start: where it begins in the file
        end: where it ends
        number: of the batch
        place: where it begins in what comes
    """

    start: int
    end: int
    number: int
    place: int


class PassedFiles(FileSet):
    """The files of a folder. What `read_all` reads comes from the rank that reads it for all, or else from storage.

    Every rank calls `read_all` as often, or takes part in its other ways.

    Args:
        folder: folder of the checkpoint
        files: the same files in storage, owned by this object
        rank: this rank
        plans: see `Plans`
    """

    _batch_bytes = MOST_BYTES

    def __init__(self, folder: str, files: FileSet, rank: int, plans: Plans) -> None:
        super().__init__(folder, files.outside)
        self._files = files
        self._rank = rank
        self._plans = plans
        self._passing: Passing | None = None
        self._pieces: dict[str, list[_ComingRange]] = {}
        self._again: list[tuple[str, int, int]] = []

    def size(self, name: str) -> int:
        """As in storage; the file is opened, in case that it is read from there."""
        return self._files.size(name)

    def stream(self, name: str) -> IO[bytes]:
        """Of the file in storage."""
        return self._files.stream(name)

    @property
    def block(self) -> ScratchBlock:
        """That of the files in storage, which may fill it."""
        return self._files.block

    def fill_block(self, name: str, offset: int, length: int) -> int | None:
        """As for `FileSet`."""
        if self._passing is None:
            return self._files.fill_block(name, offset, length)
        return super().fill_block(name, offset, length)

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        """Fill a buffer with what comes, and from storage with what does not."""
        passing, end = self._passing, offset + buffer.nbytes
        if passing is None or any(each[0] == name and each[1] < end and offset < each[2] for each in self._again):
            return self._files.fill(name, buffer, offset)
        for piece in self._pieces_in(name, offset, end):
            start, stop = max(piece.start, offset), min(piece.end, end)
            part, data = buffer[: stop - start], passing.take(piece.number)
            buffer, offset = buffer[stop - start :], stop
            if data is not None:
                place = piece.place + start - piece.start
                # Releases the GIL, unlike a slice assignment.
                libc.memmove(libc.address_of(part), libc.address_of(data) + place, part.nbytes)
            elif not self._files.fill(name, part, start):
                return False
            passing.taken(piece.number, part.nbytes)
        return True

    def _pieces_in(self, name: str, start: int, end: int) -> Iterator[_ComingRange]:
        """The pieces that a range consists of, in order. All of it was wanted, so there are no gaps."""
        pieces = self._pieces.get(name, [])
        for number in range(max(bisect_right(pieces, start, key=attrgetter("start")) - 1, 0), len(pieces)):
            if pieces[number].start >= end:
                return
            yield pieces[number]

    def _forget(self, name: str, offset: int, length: int) -> None:
        """Read a range from storage from now on: it may have been damaged on its way."""
        self._again.append((name, offset, offset + length))
        self._files._forget(name, offset, length)

    def read_all(
        self,
        reads: Sequence[RangeRead],
        progress: Progress = no_progress,
        *,
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
        batch_bytes: float = float("inf"),
    ) -> None:
        """Read what all ranks want together; see `FileSet.read_all`."""
        wanted: dict[str, list[tuple[int, int]]] = defaultdict(list)
        ordered = sorted(reads, key=attrgetter("file", "offset", "length"))
        for name, start, end in extents_of(ordered, _PADDING_BYTES):
            if start < end:
                wanted[name].append((start, end))
        planned = self._plans(wanted)
        if planned is None:
            self._files.read_all(reads, progress, inside=inside, batch_bytes=batch_bytes)
            return
        plan, self._passing = planned
        try:
            self._pieces = self._come_with(plan, self._passing.wanted)
            self._passing.start(self._taken_by(reads))
            super().read_all(reads, progress, inside=inside, batch_bytes=batch_bytes)
        finally:
            self._passing.drain()
            self._passing = None

    def _come_with(self, plan: Sequence[Batch], numbers: Sequence[int]) -> dict[str, list[_ComingRange]]:
        """What comes with these batches, by file and in order."""
        pieces: dict[str, list[_ComingRange]] = defaultdict(list)
        for number in numbers:
            place = 0
            for start, end in plan[number].part_of(self._rank):
                pieces[plan[number].file].append(_ComingRange(start, end, number, place))
                place += end - start
        return pieces

    def _taken_by(self, reads: Sequence[RangeRead]) -> Counter[int]:
        """How many bytes of each batch these reads take; tied tensors take the same ones."""
        taken = Counter[int]()
        for name, offset, length, _ in reads:
            for piece in self._pieces_in(name, offset, offset + length):
                taken[piece.number] += min(piece.end, offset + length) - max(piece.start, offset)
        return taken

    def _choose_ways(self, ordered: Sequence[RangeRead]) -> int:
        return min(os.cpu_count() or 1, _MAX_THREADS, len(ordered))

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._files.__exit__(*exception)
