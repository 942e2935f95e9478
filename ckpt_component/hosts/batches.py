"""`SharedBatches`: a rank reads the batches that it owns, serves them to those who want some, and fetches the others.

Each rank keeps the order of the plan twice. It reads the batches that it owns in that order, and only few of them ahead
of the first one that another rank has not fetched. It gets what it wants in that order, and only a little ahead of what
its own reads wait for. So the first batch of all that some rank has not got is always read and always fetched: no rank
waits for itself through another one, and memory is bounded.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from ..core import libc
from ..core.options import ResolvedTimeouts
from ..core.outside import Outside, Thread
from ..core.pages import map_private
from ..core.processes.framing import Channel
from ..core.processes.serve import Reply
from ..core.storage.checksum import Checksum
from ..core.storage.file_set import FileSet, RangeRead
from ..core.storage.space import amount
from ..errors import CheckpointError
from .peer_client import PeerClient

logger = logging.getLogger("ckpt_component.readers")


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
        stretches: what is wanted there, in order, within `share.MOST_BYTES`
        reader: the rank that reads it
    """

    file: str
    stretches: tuple[Stretch, ...]
    reader: int

    @property
    def nbytes(self) -> int:
        """How many bytes are read."""
        return sum(end - start for start, end, _ in self.stretches)

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


@dataclass(eq=False)
class _Share:
    """A batch, as one rank has it.

    Attributes:
        number: of the batch in the plan
        batch: the batch
        waiting: who has not got it yet: if this rank owns it, all who want it; else this rank
        turn: its place among those that this rank owns
        place: its place among those that this rank wants
        left: bytes that the reads of this rank have not taken
        users: how many threads take some now
        block: memory with what was read or fetched; None: nothing was, or all have got it
        sums: checksums of its stretches, if this rank has read it
        has_come: whether it was read or fetched, or is not any more
    """

    number: int
    batch: Batch
    waiting: set[int]
    turn: int = 0
    place: int = 0
    left: int = 0
    users: int = 0
    block: memoryview | None = None
    sums: Sequence[int] = ()
    has_come: bool = False

    def is_over(self, rank: int) -> bool:
        """Whether a rank need not wait for it any more."""
        return self.has_come or rank not in self.waiting

    def block_for(self, rank: int) -> memoryview | None:
        """What a rank that has waited for it gets."""
        return self.block if rank in self.waiting else None


class Coming(NamedTuple):
    """A range of a file that this rank gets: where it begins and ends there, of which batch, and where in that."""

    start: int
    end: int
    share: _Share
    place: int


#: Most batches that an owner has read, from the first one on that another rank has not fetched.
_HELD = 8
#: Most batches that a rank gets ahead of what its reads wait for. Storage has something to do as long as they are on
#: their way, however late a busy processor serves one.
_AHEAD = 16
#: Most batches that are fetched at the same time.
MOST_THREADS = 8
#: From so many failed reads on, a rank reads no more for others: they may take a minute each.
_MOST_FAILURES = 3


@dataclass(eq=False)
class SharedBatches:
    """The batches of a plan on one rank, which reads and serves those that it owns, and fetches what else it wants.

    Thread-safe. Memory is used again: fresh memory costs about as much as what it is for.

    Args:
        plan: the batches, the same on all ranks
        number: of the plan
        rank: this rank
        connect: connects to the server of a rank; raises OSError
        open_files: opens the files that the batches are of
        checksum: for bytes that nothing else verifies; None: who takes them verifies them
        outside: what this rank runs in
        timeouts: `stall`: a read waits so long for a batch, then its owner is given up; `stage` and `write`: a thread
            waits no longer when nothing has happened for both together
    """

    plan: Sequence[Batch]
    number: int
    rank: int
    connect: Callable[[int], PeerClient]
    open_files: Callable[[], FileSet]
    checksum: Checksum | None
    outside: Outside
    timeouts: ResolvedTimeouts

    def __post_init__(self) -> None:
        self._lasts = self.timeouts.stage + self.timeouts.write
        self._free, self._most_bytes = deque[memoryview](), max(batch.nbytes for batch in self.plan)
        self._shares, self._owned, self._wanted = dict[int, _Share](), list[_Share](), list[_Share]()
        self._coming: dict[str, list[Coming]] = defaultdict(list)
        for number, batch in enumerate(self.plan):
            is_owned, is_wanted = batch.reader == self.rank, self.rank in batch.ranks
            if is_owned or is_wanted:
                share = self._shares[number] = _Share(number, batch, {*batch.ranks} if is_owned else {self.rank})
            if is_owned:
                share.turn = len(self._owned)
                self._owned.append(share)
            if is_wanted:
                share.place = len(self._wanted)
                self._wanted.append(share)
                parts = batch.part_of(self.rank)
                self._coming[batch.file] += (Coming(start, end, share, place) for start, end, place, _ in parts)
        #: The first batch that it owns and that another rank has not got, by its turn.
        self._first = self._failures = 0
        #: The last batch that its reads have waited for, by place; those that they wait for; when one came last.
        self._needed, self._awaited, self._came_at = 0, list[int](), self.outside.now()
        #: The connections to ranks that this one fetches from, and the ranks that it has given up.
        self._channels, self._lost = dict[int, Channel](), set[int]()
        self._threads: list[Thread] = []
        # Two of one lock, so that a batch that comes wakes only those who read it.
        self._lock = self.outside.lock()
        self._moved, self._came = self.outside.condition(self._lock), self.outside.condition(self._lock)

    def ranges(self, file: str, start: int, end: int) -> Iterator[Coming]:
        """The ranges that one of a file consists of, in order. All of it was wanted, so there are no gaps."""
        coming = self._coming[file]
        first = max(bisect_right(coming, start, key=attrgetter("start")) - 1, 0)
        return itertools.takewhile(lambda each: each.start < end, itertools.islice(coming, first, None))

    def start(self, reads: Sequence[RangeRead]) -> None:
        """Begin to read and to fetch, for these reads; each takes its bytes, also where they are the same."""
        for file, offset, length, _ in reads:
            for each in self.ranges(file, offset, offset + length):
                each.share.left += min(each.end, offset + length) - max(each.start, offset)
        self._threads.append(self.outside.start("ckpt-share-read", self._read_all))
        owners = sorted({share.batch.reader for share in self._wanted} - {self.rank})
        for some in filter(None, (owners[number::MOST_THREADS] for number in range(MOST_THREADS))):
            self._threads.append(self.outside.start("ckpt-share-fetch", self._fetch_all, some))

    def copy(self, coming: Coming, start: int, part: memoryview) -> bool:
        """Wait for bytes, and copy them; False: they do not come, and are to be read from storage.

        Args:
            coming: the range that they are in
            start: where they begin in the file
            part: to be filled
        """
        share = coming.share
        with self._lock:
            block = self._await(share)
            if block is None:
                return False
            share.users += 1
        # Releases the GIL, unlike a slice assignment.
        place = coming.place + start - coming.start
        libc.memmove(libc.address_of(part), libc.address_of(block) + place, part.nbytes)
        with self._lock:
            share.users -= 1
            share.left -= part.nbytes
            if share.left <= 0 and not share.users:
                self._release(self.rank, [share])
        return True

    def serve(self, channel: Channel, rank: int, number: int) -> Iterator[Reply]:
        """Answer a rank that asks for what it wants of a batch, whose bytes follow."""
        share = self._shares[number]
        with self._lock:
            self._came.wait_for(partial(share.is_over, rank), self._lasts)
            block = share.block_for(rank)
        if block is None:
            yield Reply({"sums": None})
            return
        parts, until = [*share.batch.part_of(rank)], self._until()
        yield Reply({"sums": [share.sums[each] for *_, each in parts]})
        for start, end, place, _ in parts:
            channel.send_bytes(block[place : place + end - start], until)
        with self._lock:
            self._release(rank, [share])

    def leave(self, rank: int) -> None:
        """A rank fetches nothing more."""
        with self._lock:
            self._release(rank, self._owned[self._first :])
            self._came.notify_all()

    def drain(self) -> None:
        """This rank reads no more, and hangs up on those that it fetches from."""
        with self._lock:
            self._lost.update(share.batch.reader for share in self._wanted)
            self._release(self.rank, self._wanted)
            for channel in self._channels.values():
                channel.hang_up(listens=False)

    def end(self, seconds: float) -> None:
        """Wait for all threads, at most so long, when every rank has what it wants."""
        until = self.outside.now() + seconds
        for thread in self._threads:
            thread.join(max(until - self.outside.now(), 0))

    def _await(self, share: _Share) -> memoryview | None:
        owner, began = share.batch.reader, self.outside.now()
        # A rank that hangs in its own read tries it once more before the others give it up.
        seconds = self.timeouts.stall / 2 if owner == self.rank else self.timeouts.stall
        if share.place > self._needed:
            self._needed = share.place
            self._moved.notify_all()
        self._awaited.append(share.place)
        try:
            with self.outside.waits.on(f"rank {owner}, which reads for this one") as wait:
                while not share.is_over(self.rank):
                    left = max(began, self._came_at) + seconds - self.outside.now()
                    # Who owns a later batch may itself wait for the first one.
                    if left <= 0 and share.place == min(self._awaited):
                        self._give_up(owner, "it takes too long (checkpoint.timeouts.stall)")
                    else:
                        self._came.wait(left if left > 0 else seconds)
                        wait.look()
        finally:
            self._awaited.remove(share.place)
        return share.block_for(self.rank)

    def _give_up(self, owner: int, why: str) -> None:
        """Fetch nothing more from a rank."""
        if owner in self._lost:
            return
        self._lost.add(owner)
        missing = [share for share in self._wanted if share.batch.reader == owner and not share.is_over(self.rank)]
        self._release(self.rank, missing)
        self._came_at = self.outside.now()
        self._came.notify_all()
        if owner in self._channels:
            self._channels[owner].hang_up(listens=False)
        nbytes = amount(sum(share.batch.nbytes for share in missing))
        logger.warning("rank %d serves nothing: %s; %s are read from storage instead", owner, why, nbytes)

    def _release(self, rank: int, shares: Sequence[_Share]) -> None:
        """A rank has got these batches, or does without: memory that no rank waits for is used again."""
        for share in shares:
            share.waiting.discard(rank)
            if not share.waiting and share.block is not None:
                self._free.append(share.block)
                share.block = None
        while self._first < len(self._owned) and self._owned[self._first].waiting <= {self.rank}:
            self._first += 1
        self._moved.notify_all()

    def _put(self, share: _Share, block: memoryview | None) -> None:
        """A batch has come; None: it has not, and does not any more."""
        with self._lock:
            share.block, share.has_come, self._came_at = block, True, self.outside.now()
            if block is None:
                share.waiting.clear()
            # Nothing is taken of what is only between two items.
            self._release(self.rank if share.left <= 0 else -1, [share])
            self._came.notify_all()

    def _block(self) -> memoryview:
        with contextlib.suppress(IndexError):
            return self._free.pop()
        return memoryview(map_private(self._most_bytes))

    def _is_due(self, share: _Share) -> bool:
        """Whether a batch is to be read or fetched, or no rank wants it any more."""
        is_near = self.rank not in share.waiting or share.place <= self._needed + _AHEAD
        return (is_near and share.turn < self._first + _HELD) or not share.waiting

    def _until(self) -> float:
        return self.outside.now() + self._lasts

    # What this rank owns

    def _read_all(self) -> None:
        reads = []
        for share in self._owned:
            file, stretches, _ = share.batch
            start, end = stretches[0].start, stretches[-1].end
            reads.append(RangeRead(file, start, end - start, partial(self._read, share)))
        try:
            with self.open_files() as self._files:
                self._files.read_all(reads, batch_bytes=1)
        except Exception as error:  # whatever it is, the others must not wait for what was to be read
            self._fail(error)
        for share in self._owned:
            if not share.has_come:
                self._put(share, None)

    def _read(self, share: _Share) -> None:
        """Read a batch, in its turn, if a rank still wants it."""
        self._await_turn(share)
        block, sums, file = None, list[int](), share.batch.file
        if share.waiting and self._failures < _MOST_FAILURES:
            block = self._block()
            try:
                for start, end, place, _ in share.batch.part_of(self.rank):
                    part = block[place : place + end - start]
                    if not self._files.fill(file, part, start):
                        raise CheckpointError(f"{file} is too short.")
                    sums.append(0 if self.checksum is None else self.checksum.of(part))
                share.sums = sums
            except (CheckpointError, OSError) as error:
                self._free.append(block)
                block = None
                self._fail(error)
        self._put(share, block)

    def _await_turn(self, share: _Share) -> None:
        until = self._until()
        with self._lock:
            while not self._moved.wait_for(partial(self._is_due, share), self.timeouts.stall / 2):
                if self.outside.now() > until:
                    raise TimeoutError(errno.ETIMEDOUT, f"nothing was fetched for {self._lasts:g} s")
                first = self._owned[self._first]
                if share.turn >= self._first + _HELD and first.has_come:  # no rank must wait for who fetches nothing
                    for rank in first.waiting - {self.rank}:
                        logger.info("rank %d fetches nothing of rank %d, which keeps nothing for it", rank, self.rank)
                        self._release(rank, self._owned[self._first :])

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        logger.log(level, "rank %d cannot read for others, which read that for themselves: %s", self.rank, error)

    # What others own

    def _fetch_all(self, owners: Sequence[int]) -> None:
        """Fetch what some ranks own, in its order. They hear of it at once: what they read waits for this rank."""
        connections = dict[int, PeerClient]()
        with contextlib.ExitStack() as until_closed:
            for owner in owners:
                with self._giving_up(owner):
                    connections[owner] = until_closed.enter_context(contextlib.closing(self.connect(owner)))
                    channel = connections[owner].reach()
                    channel.send({"ask": "join", "plan": self.number, "rank": self.rank}, self._until())
                    with self._lock:
                        self._channels[owner] = channel
            for share in self._wanted:
                owner, block = share.batch.reader, None
                if owner not in owners:
                    continue
                with self._lock:
                    is_wanted = self._moved.wait_for(partial(self._is_due, share), self._lasts) and share.waiting
                if is_wanted:
                    with self._giving_up(owner):
                        block = self._fetch(share, connections[owner])
                    self._put(share, block)

    @contextlib.contextmanager
    def _giving_up(self, owner: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with self._lock:
                self._give_up(owner, error.strerror or str(error) or "it does not answer")
            if isinstance(error, (ConnectionResetError, ConnectionRefusedError, BrokenPipeError)):
                self.leave(owner)  # it has ended

    def _fetch(self, share: _Share, owner: PeerClient) -> memoryview | None:
        """Fetch a batch; None: it was not read, or was damaged. Raises OSError: nothing comes of its owner."""
        channel, until = self._channels[owner.rank], self._until()
        sums = owner.ask("batch", on=channel, number=share.number)[0]["sums"]
        if sums is None:
            return None
        block, is_whole = self._block(), True
        for (start, end, place, _), checksum in zip(share.batch.part_of(self.rank), sums, strict=True):
            part = block[place : place + end - start]
            owner.fill(channel, part, until)
            is_whole &= self.checksum is None or self.checksum.of(part) == checksum
        if is_whole:
            return block
        self._free.append(block)
        text = "%s that rank %d served came damaged, and is read from storage"
        logger.warning(text, amount(share.batch.nbytes), owner.rank)
        return None
