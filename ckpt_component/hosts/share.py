"""Who reads which bytes of files that several ranks want, and who gets them passed on. A pure function: no I/O.

Each file is cut by a grid. What the ranks want of a cell is a batch: one rank reads it, and sends every other rank the
bytes which that rank wants, in one message.

Each rank has a quota: its part of all bytes, less what it alone wants and therefore reads anyway. Batch by batch, that
rank reads which has used the smallest part of its quota, so all read at the same time, near each other in the files.


`GlooGroup`: a process group in which all ranks pass bytes on: the only use of `torch.distributed` in a load.

It is one of its own: what goes wrong in it does not end the connections of the program's groups.


Messages between ranks: each has what a rank wants of a batch, and says at its end whether that was read.

Their memory is used again and again, as fresh memory costs about as much as what it is for: each page is cleared first.


`Arrivals`: the batches that a rank wants, which it takes from those that read them, in the order of the plan.

A rank that ends, or sends nothing for too long, is lost: what it was to read is read from storage instead.


`Relay`: the batches that a rank reads, for others and for itself, in the order of the plan, and sends to them.

Batches on their way between ranks: each is read by one rank, and sent to those that want it, over gloo.

A rank keeps two orders, which are those of the plan. It reads its batches in that order (`Relay`), and begins with one
only if few of those before it are still on their way. It takes what it wants in that order (`Arrivals`), and only a
little ahead of what its own reads wait for. So the first batch that has not arrived is always read and always taken: no
rank waits for itself through another one, and memory is bounded.


`PassedFiles`: the files of a checkpoint that several ranks read together, each byte of which one of them reads.

`ReadOnce`: in a load that all ranks make, each byte that several of them want is read by one, and passed on.

It begins where files are read in many ranges at once (`FileSet.read_all`), whatever these ranges become: tensors, parts
of tensors in any sharding, objects. All ranks meet there, tell each other over the process group which ranges they
want, make the same plan, and read by it. They meet until all have read what they want, however often each one reads.

Checksums of the checkpoint are compared by every rank, for all that it takes. So they find what was damaged in storage,
in the memory of the rank that read it, or on its way; the rank then reads these bytes from storage. Bytes without such
checksums are sent with one, as nothing else would tell that they were damaged on their way.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import itertools
import json
import logging
import math
import os
import struct
import weakref
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import IO, Any, NamedTuple

import torch

from ..core.coordination import Coordinator
from ..core.formats.index import Index
from ..core.memory import libc
from ..core.memory.libc import memory_at
from ..core.memory.scratch import ScratchBlock
from ..core.options import ResolvedTimeouts
from ..core.outside import Outside, Thread
from ..core.progress import Progress, no_progress
from ..core.state.dense_tensors import tensor_bytes
from ..core.storage.checksum import Checksum, fastest
from ..core.storage.file_set import FileSet, RangeRead, extents_of
from ..core.storage.safe_open import read_failure
from ..core.storage.space import amount
from ..errors import CheckpointError
from ..loading.collective import CollectiveLoad, CollectiveLoads, OpenFiles

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
    """What is read at once of a file, and passed on.

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

    def part_of(self, rank: int) -> list[tuple[int, int]]:
        """What a rank gets of it: all of it if the rank reads it, else what it wants."""
        return [(start, end) for start, end, ranks in self.stretches if rank == self.reader or rank in ranks]


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


#: The tag of a message that is never sent.
_NEVER = (1 << 31) - 1


class GlooGroup:
    """See the top of this file. All ranks make one at the same time.

    Args:
        dist: `torch.distributed`, or what `Outside.distributed` has in its place
        rank: this rank
        world_size: number of ranks
        seconds: that making it may last, and a call of `gather`

    Raises:
        RuntimeError, ValueError: it cannot be made; or from a method: a connection has ended, or it takes too long
    """

    def __init__(self, dist: Any, rank: int, world_size: int, seconds: float) -> None:
        self._dist, self._rank, self._world_size = dist, rank, world_size
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))

    def send(self, message: torch.Tensor, to: int, number: int) -> Any:
        """Begin to send a message with a number; returns the work, which has its memory."""
        return self._dist.isend(message, to, group=self._group, tag=number)

    def receive(self, message: torch.Tensor, sender: int, number: int) -> Any:
        """Begin to receive one; returns the work."""
        return self._dist.irecv(message, sender, group=self._group, tag=number)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        found: list[Any] = [None] * self._world_size
        self._dist.all_gather_object(found, value, group=self._group)
        return found

    def close(self) -> None:
        """End all that still waits for something in it."""
        # A wait that takes too long closes all connections of a group; nothing else ends a wait for a rank that hangs.
        byte = torch.empty(1, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(RuntimeError, ValueError):
            work = self.receive(byte, (self._rank + 1) % self._world_size, _NEVER)
            work.wait(timedelta(milliseconds=1))
        with contextlib.suppress(RuntimeError, ValueError):  # the program has destroyed all groups
            self._dist.destroy_process_group(self._group)


logger = logging.getLogger("ckpt_component.readers")

#: At the end of a message: whether its bytes were read, and their checksum.
_TRAILER = struct.Struct("<?Q")


class Messages:
    """What this rank sends to others and gets from them, over gloo. Thread-safe.

    Args:
        rank: this rank
        group: of all ranks
        checksum: of every message, for bytes that nothing else verifies; None: who takes them verifies them
        most_bytes: of a batch
        lasts: seconds that one message may last
    """

    def __init__(self, rank: int, group: GlooGroup, checksum: Checksum | None, most_bytes: int, lasts: float) -> None:
        self._rank, self._group, self._checksum, self._most_bytes = rank, group, checksum, most_bytes
        self._lasts = timedelta(seconds=lasts)
        #: Memory that nobody has a view of now.
        self._free: deque[torch.Tensor] = deque()

    def blank(self, nbytes: int) -> torch.Tensor:
        """Memory for a message of so many bytes, which says that they were not read."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(self._most_bytes + _TRAILER.size, dtype=torch.uint8, device="cpu")
        lease = _Lease()
        weakref.finalize(lease, self._free.append, memory).atexit = False
        message = torch.frombuffer(memory_at(memory.data_ptr(), nbytes + _TRAILER.size, lease), dtype=torch.uint8)
        message[nbytes:] = 0
        return message

    def seal(self, message: torch.Tensor) -> None:
        """Say that the bytes of a message are there."""
        view = tensor_bytes(message)
        checksum = 0 if self._checksum is None else self._checksum.of(view[: -_TRAILER.size])
        _TRAILER.pack_into(view, view.nbytes - _TRAILER.size, True, checksum)

    def part(self, message: torch.Tensor, places: list[tuple[int, int]]) -> torch.Tensor:
        """A message of some of the bytes of another one."""
        part = self.blank(sum(end - start for start, end in places))
        torch.cat([message[start:end] for start, end in places], out=part[: -_TRAILER.size])
        if bool(message[-_TRAILER.size]):  # it was read
            self.seal(part)
        return part

    def content(self, message: torch.Tensor, sender: int) -> memoryview | None:
        """The bytes of a message; None if they were not read, or are not as they were sent."""
        view = tensor_bytes(message)
        data = view[: -_TRAILER.size]
        is_read, checksum = _TRAILER.unpack(view[-_TRAILER.size :])
        if not is_read:
            return None
        if self._checksum is None or sender == self._rank or self._checksum.of(data) == checksum:
            return data
        logger.warning("%s that rank %d sent came damaged, and is read from storage", amount(data.nbytes), sender)
        return None

    def send(self, message: torch.Tensor, to: int, number: int) -> Any:
        """Begin to send the message with a batch, by its number; returns the work, which has its memory.

        Raises:
            RuntimeError, ValueError: the connection has ended
        """
        return self._group.send(message, to, number)

    def receive(self, nbytes: int, sender: int, number: int) -> torch.Tensor:
        """Wait for the message with a batch, of so many bytes.

        Raises:
            RuntimeError, ValueError: the connection has ended, or it takes too long
        """
        message = self.blank(nbytes)
        self.wait(self._group.receive(message, sender, number))
        return message

    def wait(self, work: Any) -> None:
        """Wait until a message has arrived; raises as `receive`."""
        work.wait(self._lasts)


class _Lease:
    """Lives as long as somebody has a view of a message's memory."""


#: Most batches that a rank reads or takes ahead of what its reads wait for. Storage has something to do as long as
#: they are on their way, however late a busy processor passes one on.
_AHEAD = 16
#: Most batches that come at the same time.
_MOST_THREADS = 8


class Arrivals:
    """What one rank takes of the batches of a plan. Thread-safe.

    Args:
        plan: the batches, the same on all ranks
        rank: this rank
        messages: between it and the others
        run: runs a function in a thread
        waits: seconds that a read waits for a batch; then the rank that was to send it is lost
        lasts: seconds without anything new after which a thread waits no longer for the reads of its own rank
        outside: what this rank runs in

    Attributes:
        wanted: numbers of the batches that this rank wants some of, in order
        changed: for waits for a place, of batches to be read or taken; notified when there may be one
        is_broken: whether a message may still be on its way when all threads that could end have ended
    """

    def __init__(
        self,
        plan: Sequence[Batch],
        rank: int,
        messages: Messages,
        run: Callable[[Callable[[], None]], None],
        *,
        waits: float,
        lasts: float,
        outside: Outside,
    ) -> None:
        self._now = outside.now
        self._plan, self._rank, self._messages, self._run = plan, rank, messages, run
        self._waits, self._lasts = waits, lasts
        self.wanted = [number for number, batch in enumerate(plan) if rank in batch.ranks]
        # Two of one lock, so that a batch that comes wakes nobody but those who read it.
        lock = outside.lock()
        self.changed, self._came = outside.condition(lock), outside.condition(lock)
        self.is_broken = False
        self._place = {number: place for place, number in enumerate(self.wanted)}
        self._to_take = deque(number for number in self.wanted if plan[number].reader != rank)
        #: What came of a batch; None: it did not come, or nothing is left to be taken of it.
        self._arrived: dict[int, memoryview | None] = {}
        self._left: dict[int, int] = {}
        self._needed = 0
        self._awaited: list[int] = []
        #: When a batch came last, or was given up.
        self._moved = self._now()
        self._is_drained = False
        #: Batches that threads are receiving.
        self._receiving: list[int] = []
        self._lost: set[int] = set()

    def start(self, left: Mapping[int, int]) -> None:
        """Begin to take; argument as for `Passing.start`."""
        self._left = dict(left)
        for _ in range(min(_MOST_THREADS, len(self._to_take))):
            self._run(self._receive)

    def take(self, number: int) -> memoryview | None:
        """See `Passing.take`."""
        reader, began = self._plan[number].reader, self._now()
        # A rank that hangs in a read of its own tries it once more before the others give it up.
        seconds = self._waits / 2 if reader == self._rank else self._waits
        with self.changed:
            if self._place[number] > self._needed:
                self._needed = self._place[number]
                self.changed.notify_all()
            self._awaited.append(number)
            try:
                while number not in self._arrived:
                    left = max(began, self._moved) + seconds - self._now()
                    # Who is to send a later batch may itself wait for the first one.
                    if left <= 0 and number == min(self._awaited):
                        break
                    self._came.wait(left if left > 0 else seconds)
            finally:
                self._awaited.remove(number)
            if number in self._arrived:
                return self._arrived[number]
        self._give_up(reader)
        return None

    def taken(self, number: int, nbytes: int) -> None:
        """See `Passing.taken`."""
        with self.changed:
            self._left[number] = self._left.get(number, 0) - nbytes
            if self._left[number] <= 0:
                self._arrived[number] = None

    def drain(self) -> None:
        """See `Passing.drain`."""
        with self.changed:
            self._is_drained = True
            self._arrived = dict.fromkeys(self._arrived)
            self.changed.notify_all()

    def has_place_for(self, number: int) -> bool:
        """Whether a batch is near what this rank's reads wait for, or it does not want it. Asked with `changed`."""
        return number not in self._place or self._is_near(number)

    def arrive(self, number: int, message: torch.Tensor) -> None:
        """Keep a batch if this rank wants it, it was read, and it is as it was sent."""
        if number not in self._place:
            return
        data = self._messages.content(message, self._plan[number].reader)
        with self.changed:
            if number not in self._arrived:
                self._arrived[number] = None if self._is_drained else data
                self._moved = self._now()
                self._came.notify_all()

    def _receive(self) -> None:
        while (number := self._next()) is not None:
            batch = self._plan[number]
            nbytes = sum(end - start for start, end in batch.part_of(self._rank))
            try:
                message = self._messages.receive(nbytes, batch.reader, number)
            except (RuntimeError, ValueError) as error:
                self._lose(batch.reader, f"its connection ended ({str(error).partition('. ')[0][-200:]})")
            else:
                self.arrive(number, message)
                del message  # its memory is of use for the next one
            finally:
                with self.changed:
                    self._receiving.remove(number)

    def _next(self) -> int | None:
        """The batch to receive next, when it is near; None: there are no more, or this rank's reads stand still."""
        with self.changed:
            while self._to_take:
                number = self._to_take[0]
                if self._plan[number].reader in self._lost:
                    self._to_take.popleft()
                elif self._is_near(number):
                    self._receiving.append(number)
                    return self._to_take.popleft()
                elif not self.changed.wait(self._lasts):
                    return None
        return None

    def _is_near(self, number: int) -> bool:
        return self._is_drained or self._place[number] <= self._needed + _AHEAD

    def _give_up(self, reader: int) -> None:
        """Wait no longer for a rank. The threads that wait for what it sends cannot be called back: others go on."""
        with self.changed:
            is_new = reader not in self._lost
            stuck = [number for number in self._receiving if self._plan[number].reader == reader]
        self.is_broken = True
        self._lose(reader, "it takes too long (checkpoint.timeouts.stall)")
        for _ in stuck if is_new else ():
            self._run(self._receive)

    def _lose(self, reader: int, why: str) -> None:
        with self.changed:
            if reader in self._lost:
                return
            self._lost.add(reader)
            missing = [n for n in self.wanted if self._plan[n].reader == reader and n not in self._arrived]
            self._arrived.update(dict.fromkeys(missing))
            self._moved = self._now()
            self._came.notify_all()
            self.changed.notify_all()
        nbytes = amount(sum(self._plan[number].nbytes for number in missing))
        logger.warning("rank %d passes nothing on: %s; %s are read from storage instead", reader, why, nbytes)


#: Most batches of a rank that are on their way to others.
_IN_FLIGHT = 8
#: From so many failed reads on, a rank reads no more for others: they may take a minute each.
_MOST_FAILURES = 3


class _Sent(NamedTuple):
    """A batch on its way.

    Attributes:
        turn: its place in the order of what this rank reads
        works: the sends, by rank; they have the memory
    """

    turn: int
    works: list[tuple[int, Any]]


class Relay:
    """What one rank reads of the batches of a plan.

    Args:
        plan: the batches, the same on all ranks
        rank: this rank
        messages: between it and the others
        arrivals: what it takes itself
        open_files: opens the files that the batches are of
        lasts: seconds without anything new after which it reads no more
    """

    def __init__(
        self,
        plan: Sequence[Batch],
        rank: int,
        messages: Messages,
        arrivals: Arrivals,
        open_files: Callable[[], FileSet],
        *,
        lasts: float,
    ) -> None:
        self._plan, self._rank, self._messages, self._arrivals = plan, rank, messages, arrivals
        self._open_files, self._lasts = open_files, lasts
        self._to_read = [number for number, batch in enumerate(plan) if batch.reader == rank]
        self._turn = {number: turn for turn, number in enumerate(self._to_read)}
        self._changed = arrivals.changed
        self._sent: deque[_Sent] = deque()
        #: The first turn whose batch is not taken by all yet, and those after it whose batches are.
        self._first, self._ended = 0, set[int]()
        self._passed: set[int] = set()
        self._files: FileSet | None = None
        self._failures = 0

    @property
    def has_work(self) -> bool:
        """Whether this rank reads anything."""
        return bool(self._to_read)

    def work(self) -> None:
        """Read and send all batches; what cannot be read, the others are told to read for themselves."""
        reads = []
        for number in self._to_read:
            batch = self._plan[number]
            start, end = batch.stretches[0].start, batch.stretches[-1].end
            reads.append(RangeRead(batch.file, start, end - start, partial(self._pass_on, number)))
        try:
            with self._open_files() as self._files:
                self._files.read_all(reads, batch_bytes=1)
        except Exception as error:  # whatever it is, the others must not wait for what was to be read
            self._fail(error)
        for number in self._to_read:
            if number not in self._passed:
                self._send(number, self._messages.blank(self._plan[number].nbytes))
        while self._sent:
            self._await(self._sent.popleft())

    def _pass_on(self, number: int) -> None:
        """Read a batch, in its turn, and send it."""
        while (oldest := self._admit(number)) is not None:
            self._await(oldest)
        batch = self._plan[number]
        message = self._messages.blank(batch.nbytes)
        if self._failures < _MOST_FAILURES:
            try:
                self._fill(message, batch)
            except (CheckpointError, OSError) as error:
                self._fail(error)
            else:
                self._messages.seal(message)
        self._send(number, message)

    def _admit(self, number: int) -> _Sent | None:
        """Wait for the turn of a batch; or return one that is on its way, to be waited for first."""
        with self._changed:
            while True:
                has_room = self._turn[number] < self._first + _IN_FLIGHT
                if has_room and self._arrivals.has_place_for(number):
                    return None
                if not has_room and self._sent:
                    return self._sent.popleft()
                if not self._changed.wait(self._lasts):  # for a thread that sends, or for this rank's own reads
                    raise TimeoutError(errno.ETIMEDOUT, f"nothing was taken for {self._lasts:g} s")

    def _fill(self, message: torch.Tensor, batch: Batch) -> None:
        """Read a batch into a message."""
        view, place = tensor_bytes(message), 0
        for start, end, _ in batch.stretches:
            part = view[place : place + end - start]
            if self._files is None or not self._files.fill(batch.file, part, start):
                raise CheckpointError(f"{batch.file} is too short.")
            place += part.nbytes

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        logger.log(level, "rank %d cannot read for others, which read that for themselves: %s", self._rank, error)

    def _send(self, number: int, message: torch.Tensor) -> None:
        """Send a batch to all who want some of it, this rank included."""
        batch, works = self._plan[number], []
        self._passed.add(number)
        for rank in batch.ranks:
            if rank == self._rank:
                continue
            try:
                works.append((rank, self._messages.send(self._part_for(rank, batch, message), rank, number)))
            except (RuntimeError, ValueError) as error:
                logger.debug("rank %d gets nothing more of rank %d: %s", rank, self._rank, error)
        self._arrivals.arrive(number, message)
        with self._changed:
            self._sent.append(_Sent(self._turn[number], works))
            self._changed.notify_all()

    def _part_for(self, rank: int, batch: Batch, message: torch.Tensor) -> torch.Tensor:
        """The message for a rank: all of the batch, or the stretches that it wants."""
        if all(rank in stretch.ranks for stretch in batch.stretches):
            return message
        place, places = 0, []
        for start, end, ranks in batch.stretches:
            if rank in ranks:
                places.append((place, place + end - start))
            place += end - start
        return self._messages.part(message, places)

    def _await(self, sent: _Sent) -> None:
        """Wait until a batch has arrived, wherever there still is somebody who takes it."""
        for rank, work in sent.works:
            try:
                self._messages.wait(work)
            except (RuntimeError, ValueError) as error:
                logger.debug("rank %d took nothing more of rank %d: %s", rank, self._rank, error)
        with self._changed:
            self._ended.add(sent.turn)
            while self._first in self._ended:
                self._ended.remove(self._first)
                self._first += 1
            self._changed.notify_all()


class Passing:
    """What one rank does with the batches of a plan.

    Args:
        plan: the batches, the same on all ranks
        rank: this rank
        group: of all ranks
        open_files: opens the files that the batches are of
        checksum: of every message, for bytes that nothing else verifies; None: who takes them verifies them
        waits: seconds that a read waits for a batch; then the rank that was to send it is lost
        lasts: seconds that one message may last
        outside: what this rank runs in
    """

    def __init__(
        self,
        plan: Sequence[Batch],
        rank: int,
        group: GlooGroup,
        open_files: Callable[[], FileSet],
        checksum: Checksum | None,
        *,
        waits: float,
        lasts: float,
        outside: Outside,
    ) -> None:
        self._outside = outside
        messages = Messages(rank, group, checksum, max(batch.nbytes for batch in plan), lasts)
        self._arrivals = Arrivals(plan, rank, messages, self._run, waits=waits, lasts=lasts, outside=outside)
        self._relay = Relay(plan, rank, messages, self._arrivals, open_files, lasts=lasts)
        self._threads: list[Thread] = []
        self._has_threads_left = False

    @property
    def wanted(self) -> Sequence[int]:
        """Numbers of the batches that this rank wants some of, in order."""
        return self._arrivals.wanted

    @property
    def is_broken(self) -> bool:
        """Whether a message may still be on its way, so that the group is to be given up."""
        return self._arrivals.is_broken or self._has_threads_left

    def start(self, left: Mapping[int, int]) -> None:
        """Begin to read, to send and to take.

        Args:
            left: how many bytes of each batch, by number, the reads of this rank take, counted as often as they do
        """
        if self._relay.has_work:
            self._run(self._relay.work)
        self._arrivals.start(left)

    def take(self, number: int) -> memoryview | None:
        """Wait for the bytes of a batch that this rank wants; None: they do not come, or were all taken before."""
        return self._arrivals.take(number)

    def taken(self, number: int, nbytes: int) -> None:
        """Bytes of a batch were taken; its memory is freed when nothing is left to take."""
        self._arrivals.taken(number, nbytes)

    def drain(self) -> None:
        """This rank reads no more. What still comes is taken, so that its sender can go on, and dropped."""
        self._arrivals.drain()

    def end(self, seconds: float) -> None:
        """Wait for all threads, when every rank has what it wants; `is_broken` is set if they do not end in time."""
        until = self._outside.now() + seconds
        for thread in self._threads:
            thread.join(max(until - self._outside.now(), 0))
            self._has_threads_left |= thread.is_alive()

    def _run(self, work: Callable[[], None]) -> None:
        self._threads.append(self._outside.start(f"ckpt-pass-{len(self._threads)}", work))


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


#: Whether a rank has a group to pass bytes over, can make one with the others, or cannot. Then what the ranks do next:
#: pass bytes on over their group or a new one, read by themselves, or end, as all have read.
_READY, _NEW, _ALONE, _END = "ready", "new", "alone", "end"
#: For each rank more, so many seconds more to make a group, in which all connect to all.
_SECONDS_PER_RANK = 0.1


class ReadOnce(CollectiveLoads):
    """Makes loads whose ranks read together, and keeps the process group that they pass bytes over.

    Args:
        ranks: the ranks, which make their loads in the same order
        timeouts: `stall`: a rank that sends nothing for so long is lost; others as for `CollectiveLoad`
    """

    def __init__(self, ranks: Coordinator, timeouts: ResolvedTimeouts) -> None:
        super().__init__(ranks, timeouts)
        self._reads_alone = False
        self._group: GlooGroup | None = None
        self._has_failed = False

    def load(self, about: str, tag: str | None = None, name: str = "load") -> CollectiveLoad:
        """As for `CollectiveLoads`."""
        if self._reads_alone:
            return super().load(about, tag, name)
        return _LoadOnce(self, self._ranks, self._timeouts, about, tag, name)

    def meet(self, tag: str, has_read: bool, is_broken: bool) -> str:
        """Meet the other ranks; returns what all do next, and makes their group if they need one.

        Args:
            tag: names the question
            has_read: whether this rank has read what it wants
            is_broken: whether this rank's group is to be given up

        Raises:
            RanksError, CheckpointTimeoutError: a rank is dead, or does not come
        """
        now, timeouts, dist = self._ranks.outside.now(), self._timeouts, self._ranks.outside.distributed()
        has_world = dist is not None and dist.get_world_size() == self._ranks.world_size
        state = _ALONE if self._has_failed or not has_world else _NEW if self._group is None or is_broken else _READY
        try:
            value = [self._ranks.outside.host_name(), state, has_read]
            step: str = self._ranks.decide(tag, value, _next_step, now + timeouts.stage + timeouts.write)
        except CheckpointError:
            self.close()
            raise
        if step == _NEW or is_broken:
            self.close()
        if step == _NEW:
            self._make_group(dist)
        self._reads_alone |= step == _ALONE
        return step

    def close(self) -> None:
        """Give the group up, and end all that still waits for something in it. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _make_group(self, dist: Any) -> None:
        # All ranks have just met. torch.distributed does not know of our heartbeats: it would wait for a dead rank.
        size, timeouts = self._ranks.world_size, self._timeouts
        seconds = min(timeouts.heartbeat + _SECONDS_PER_RANK * size, timeouts.stage)
        try:
            self._group = GlooGroup(dist, self._ranks.rank, size, seconds)
        except (RuntimeError, ValueError) as error:
            self._has_failed = True
            text = "rank %d reads all by itself: no gloo group could be made (%s); see GLOO_SOCKET_IFNAME"
            logger.warning(text, self._ranks.rank, error)

    def passing(self, plan: Sequence[Batch], open_files: Callable[[], FileSet], checksum: Checksum | None) -> Passing:
        """What passes the batches of a plan on over the group; arguments as for `Passing`."""
        waits, lasts = self._timeouts.stall, self._timeouts.stage + self._timeouts.write
        assert self._group is not None, "who cannot tell the others what it wants shares nothing with them"
        return Passing(
            plan,
            self._ranks.rank,
            self._group,
            open_files,
            checksum,
            waits=waits,
            lasts=lasts,
            outside=self._ranks.outside,
        )

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks; this rank's alone if they cannot be exchanged, with a warning."""
        group = self._group
        try:
            if group is not None:
                return group.gather(value)
        except (RuntimeError, ValueError) as error:
            logger.warning("rank %d reads all by itself: what others want cannot be told (%s)", self._ranks.rank, error)
            self.close()
        return [value if rank == self._ranks.rank else None for rank in range(self._ranks.world_size)]


def _next_step(values: Sequence[Any]) -> str:
    """On the leading rank: what all ranks do next, given the host, the state and `has_read` of each."""
    hosts, states, have_read = zip(*values, strict=True)
    if _ALONE in states or len({*hosts}) == 1:
        return _ALONE
    if all(have_read):
        return _END
    return _NEW if _NEW in states else _READY


class _LoadOnce(CollectiveLoad):
    """A load whose ranks read together.

    Args:
        once: meets the others; further arguments as for `CollectiveLoad`
    """

    def __init__(
        self, once: ReadOnce, ranks: Coordinator, timeouts: ResolvedTimeouts, about: str, tag: str | None, name: str
    ) -> None:
        super().__init__(ranks, timeouts, about, tag, name)
        self._once = once
        self._passing: Passing | None = None
        self._meetings = 0
        self._step = ""

    def opens(self, open_files: OpenFiles, index: Index, verified: bool) -> OpenFiles:
        """Files whose reads all ranks of this load plan together."""
        checksum = None if verified and index.manifest is not None else fastest()
        return partial(self._opened, open_files, index, checksum)

    def _opened(self, open_files: OpenFiles, index: Index, checksum: Checksum | None, folder: str) -> FileSet:
        plans = partial(self._plan, partial(open_files, folder), index, checksum)
        return PassedFiles(folder, open_files(folder), self._ranks.rank, plans)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """As for `CollectiveLoad`; this rank has read when its part of such a phase is done, or has failed."""
        with super().phase(name):
            try:
                yield
            except Exception:
                self._wait_for_readers(name)
                raise
            self._wait_for_readers(name)

    def _wait_for_readers(self, phase: str) -> None:
        """Take part in what others still read together."""
        while phase in ("compare", "read") and self._meet(has_read=True) not in (_ALONE, _END):
            self._once.exchange(("", {}))

    def _meet(self, has_read: bool) -> str:
        """What all ranks do next; when they meet, each has what was passed on since they met last."""
        if self._step == _ALONE:
            return _ALONE
        self._meetings += 1
        before, self._passing = self._passing, None
        is_broken = before is not None and before.is_broken
        try:
            self._step = self._once.meet(f"{self._tag}/together/{self._meetings}", has_read, is_broken)
        except CheckpointError:
            self._step = _ALONE  # a meeting fails on all ranks, so none comes to a further one
            raise
        if before is not None:
            before.end(self._timeouts.close)
            if before.is_broken and not is_broken:
                self._once.close()
        return self._step

    def _plan(
        self, open_files: Callable[[], FileSet], index: Index, checksum: Checksum | None, wanted: Wanted
    ) -> tuple[Sequence[Batch], Passing] | None:
        """The plan of all ranks that now read the same checkpoint; None: it has nothing that this one shares."""
        if self._meet(has_read=False) == _ALONE:
            return None
        rank, identity, wants = self._ranks.rank, _identity(index), dict[int, Wanted]()
        for other, value in enumerate(self._once.exchange((identity, dict(wanted)))):
            if value is not None and value[0] == identity:
                wants[other] = value[1]
        plan = plan_reads(wants)
        if self._ranks.is_leader and plan:
            shared, all_bytes = (sum(batch.nbytes for batch in plan if len(batch.ranks) > n) for n in (1, 0))
            text = "%d ranks read %s together; %s of it are wanted by several, and read by one"
            logger.info(text, len(wants), amount(all_bytes), amount(shared))
        takes_part = ({*batch.ranks, batch.reader} for batch in plan)
        if not any(rank in ranks and len(ranks) > 1 for ranks in takes_part):
            return None
        self._passing = self._once.passing(plan, open_files, checksum)
        return plan, self._passing


def _identity(index: Index) -> str:
    """Equal on ranks that read the same checkpoint, and only there: hosts may have other files under the same path."""
    if index.manifest is not None:
        about: Any = index.manifest  # which names the attempt of the save
    else:
        paths = {name: os.path.join(index.folder, name) for name in index.files}
        try:
            about = {path: (index.files[name], index.storage.modified(path)) for name, path in paths.items()}
        except OSError as error:
            raise read_failure(index.path, error) from error
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
