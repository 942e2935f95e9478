"""Each byte that several hosts want is read by one of them: `ReadOnce`, in a load that all ranks make.

It begins where files are read in many ranges at once (`FileSet.read_all`), whatever these ranges become: tensors, parts
of tensors in any sharding, objects. All ranks meet there, tell which ranges they want, make the same plan, and read by
it. They meet until all have read what they want, however often each one reads.

A file is cut by a grid. What the ranks want of a cell is a batch, which one rank owns: it reads the batch and serves
it, over the signed connections of `wire`, to those who want some of it. They fetch it from its owner.

Each rank keeps the order of the plan twice. It reads the batches that it owns in that order, and only few of them ahead
of the first one that another rank has not fetched. It gets what it wants in that order, and only a little ahead of what
its own reads wait for. So the first batch of all that somebody has not got is always read and always fetched: no rank
waits for itself through another one, and memory is bounded.

Checksums of the checkpoint are compared by every rank, for all that it takes. So they find what was damaged in storage,
in the memory of its owner, or on its way; the rank then reads these bytes from storage. Bytes without such checksums
are served with one, as nothing else would tell that they were damaged on their way.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import math
import mmap
import os
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import IO, Any, NamedTuple

from ..core import libc
from ..core.coordination import Coordinator
from ..core.coordination.connection import offered_address, reachable
from ..core.options import ResolvedTimeouts
from ..core.outside import Outside, Thread
from ..core.pages import ScratchBlock
from ..core.processes.framing import Channel
from ..core.processes.serve import FrameRequest, Reply, answer_requests, as_os_error
from ..core.progress import Progress, no_progress
from ..core.storage.checksum import Checksum, fastest
from ..core.storage.file_set import FileSet, RangeRead, extents_of
from ..core.storage.safe_open import read_failure
from ..core.storage.space import amount
from ..errors import CheckpointError
from ..formats.index import Index
from ..loading.collective import OpenFiles, SharedReads
from ..loading.read_plan import MOST_BYTES, Batch, Wanted, plan_reads
from .server import ConnectionServer, PeerEndpoint
from .wire import PeerAddress, connect_to_peer

logger = logging.getLogger("ckpt_component.readers")


class BatchBytes(NamedTuple):
    """Memory for a batch, and the checksum of each stretch that is there."""

    view: memoryview
    sums: list[int]


class Coming(NamedTuple):
    """A range of a file that this rank gets: where it begins and ends there, of which batch, and where in that."""

    start: int
    end: int
    number: int
    place: int


#: Most batches that an owner has read, from the first one on that another rank has not fetched.
_HELD = 8
#: Most batches that a rank gets ahead of what its reads wait for. Storage has something to do as long as they are on
#: their way, however late a busy processor serves one.
_AHEAD = 16
#: Most batches that are fetched at the same time.
_MOST_THREADS = 8
#: From so many failed reads on, a rank reads no more for others: they may take a minute each.
_MOST_FAILURES = 3


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

    def __init__(
        self,
        plan: Sequence[Batch],
        number: int,
        rank: int,
        connect: Callable[[int], Channel],
        open_files: Callable[[], FileSet],
        checksum: Checksum | None,
        outside: Outside,
        timeouts: ResolvedTimeouts,
    ) -> None:
        self._plan, self._number, self._rank, self._connect, self._open_files = plan, number, rank, connect, open_files
        self._checksum, self._outside = checksum, outside
        self._waits, self._lasts = timeouts.stall, timeouts.stage + timeouts.write
        self._free, self._most_bytes = deque[BatchBytes](), max(batch.nbytes for batch in plan)
        #: Who has not got a batch yet: of those that this rank owns, all who want it; else this rank.
        self._waiting = {
            number: {*batch.ranks} if batch.reader == rank else {rank}
            for number, batch in enumerate(plan)
            if rank in (batch.reader, *batch.ranks)
        }
        self._owned = [number for number in self._waiting if plan[number].reader == rank]
        self._wanted = [number for number in self._waiting if rank in plan[number].ranks]
        self._place = {number: place for place, number in enumerate(self._wanted)}
        #: What was read or fetched of a batch; None: nothing was, or all have got it.
        self._blocks: dict[int, BatchBytes | None] = {}
        #: The first batch that it owns and that another rank has not got, by its place in their order.
        self._first = self._failures = 0
        #: Of each batch, the bytes that its reads have not taken, and how many threads do that now.
        self._left, self._users = Counter[int](), Counter[int]()
        #: The last batch that its reads have waited for, by place; those that they wait for; when one came last.
        self._needed, self._awaited, self._came_at = 0, list[int](), outside.now()
        self._channels, self._lost = dict[int, Channel](), set[int]()
        self._threads: list[Thread] = []
        # Two of one lock, so that a batch that comes wakes nobody but those who read it.
        self._lock = outside.lock()
        self._moved, self._came = outside.condition(self._lock), outside.condition(self._lock)
        self._coming: dict[str, list[Coming]] = defaultdict(list)
        for number in self._wanted:
            for start, end, place, _ in plan[number].part_of(rank):
                self._coming[plan[number].file].append(Coming(start, end, number, place))

    def ranges(self, file: str, start: int, end: int) -> Iterator[Coming]:
        """The ranges that one of a file consists of, in order. All of it was wanted, so there are no gaps."""
        coming = self._coming[file]
        first = max(bisect_right(coming, start, key=attrgetter("start")) - 1, 0)
        return itertools.takewhile(lambda each: each.start < end, itertools.islice(coming, first, None))

    def start(self, reads: Sequence[RangeRead]) -> None:
        """Begin to read and to fetch, for these reads; each takes its bytes, also where they are the same."""
        for file, offset, length, _ in reads:
            for each in self.ranges(file, offset, offset + length):
                self._left[each.number] += min(each.end, offset + length) - max(each.start, offset)
        self._threads.append(self._outside.start("ckpt-share-read", self._read_all))
        owners = sorted({self._plan[number].reader for number in self._wanted} - {self._rank})
        for number in range(min(len(owners), _MOST_THREADS)):
            self._threads.append(
                self._outside.start("ckpt-share-fetch", self._fetch_all, owners[number::_MOST_THREADS])
            )

    def copy(self, coming: Coming, start: int, part: memoryview) -> bool:
        """Wait for bytes, and copy them; False: they do not come, and are to be read from storage.

        Args:
            coming: the range that they are in
            start: where they begin in the file
            part: to be filled
        """
        number = coming.number
        with self._lock:
            block = self._await(number)
            if block is None:
                return False
            self._users[number] += 1
        # Releases the GIL, unlike a slice assignment.
        place = coming.place + start - coming.start
        libc.memmove(libc.address_of(part), libc.address_of(block.view) + place, part.nbytes)
        with self._lock:
            self._users[number] -= 1
            self._left[number] -= part.nbytes
            if self._left[number] <= 0 and not self._users[number]:
                self._release(self._rank, [number])
        return True

    def serve(self, channel: Channel, rank: int, number: int) -> Iterator[Reply]:
        """Answer a rank that asks for what it wants of a batch, whose bytes follow."""
        with self._lock:
            self._came.wait_for(lambda: self._is_over(number, rank), self._lasts)
            block = self._block_of(number, rank)
        if block is None:
            yield Reply({"sums": None})
            return
        parts, until = [*self._plan[number].part_of(rank)], self._until()
        yield Reply({"sums": [block.sums[each] for *_, each in parts]})
        for start, end, place, _ in parts:
            channel.send_bytes(block.view[place : place + end - start], until)
        with self._lock:
            self._release(rank, [number])

    def leave(self, rank: int) -> None:
        """A rank fetches nothing more."""
        with self._lock:
            self._release(rank, self._owned[self._first :])
            self._came.notify_all()

    def drain(self) -> None:
        """This rank reads no more, and hangs up on those that it fetches from."""
        with self._lock:
            self._lost.update(range(max(batch.reader for batch in self._plan) + 1))
            self._release(self._rank, self._wanted)
            for channel in self._channels.values():
                channel.hang_up(listens=False)

    def end(self, seconds: float) -> None:
        """Wait for all threads, at most so long, when every rank has what it wants."""
        until = self._outside.now() + seconds
        for thread in self._threads:
            thread.join(max(until - self._outside.now(), 0))

    def _is_over(self, number: int, rank: int) -> bool:
        """Whether a rank need not wait for a batch any more."""
        return number in self._blocks or rank not in self._waiting[number]

    def _block_of(self, number: int, rank: int) -> BatchBytes | None:
        return self._blocks.get(number) if rank in self._waiting[number] else None

    def _await(self, number: int) -> BatchBytes | None:
        owner, began = self._plan[number].reader, self._outside.now()
        # A rank that hangs in a read of its own tries it once more before the others give it up.
        seconds = self._waits / 2 if owner == self._rank else self._waits
        if self._place[number] > self._needed:
            self._needed = self._place[number]
            self._moved.notify_all()
        self._awaited.append(number)
        try:
            with self._outside.waits.on(f"rank {owner}, which reads for this one") as wait:
                while not self._is_over(number, self._rank):
                    left = max(began, self._came_at) + seconds - self._outside.now()
                    # Who owns a later batch may itself wait for the first one.
                    if left <= 0 and number == min(self._awaited):
                        self._give_up(owner, "it takes too long (checkpoint.timeouts.stall)")
                    else:
                        self._came.wait(left if left > 0 else seconds)
                        wait.look()
        finally:
            self._awaited.remove(number)
        return self._block_of(number, self._rank)

    def _give_up(self, owner: int, why: str) -> None:
        """Fetch nothing more from a rank."""
        if owner in self._lost:
            return
        self._lost.add(owner)
        missing = [n for n in self._wanted if self._plan[n].reader == owner and not self._is_over(n, self._rank)]
        self._release(self._rank, missing)
        self._came_at = self._outside.now()
        self._came.notify_all()
        if owner in self._channels:
            self._channels[owner].hang_up(listens=False)
        nbytes = amount(sum(self._plan[number].nbytes for number in missing))
        logger.warning("rank %d serves nothing: %s; %s are read from storage instead", owner, why, nbytes)

    def _release(self, rank: int, numbers: Sequence[int]) -> None:
        """A rank has got these batches, or does without: memory that nobody waits for is used again."""
        for number in numbers:
            self._waiting[number].discard(rank)
            if not self._waiting[number] and (block := self._blocks.get(number)) is not None:
                self._free.append(block)
                self._blocks[number] = None
        while self._first < len(self._owned) and self._waiting[self._owned[self._first]] <= {self._rank}:
            self._first += 1
        self._moved.notify_all()

    def _put(self, number: int, block: BatchBytes | None) -> None:
        """A batch has come; None: it has not, and does not any more."""
        with self._lock:
            self._blocks[number], self._came_at = block, self._outside.now()
            if block is None:
                self._waiting[number].clear()
            # Nothing is taken of what is only between two items.
            self._release(self._rank if self._left[number] <= 0 else -1, [number])
            self._came.notify_all()

    def _block(self) -> BatchBytes:
        with contextlib.suppress(IndexError):
            return self._free.pop()
        return BatchBytes(memoryview(mmap.mmap(-1, self._most_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)), [])

    # What this rank owns

    def _read_all(self) -> None:
        reads = []
        for turn, number in enumerate(self._owned):
            batch = self._plan[number]
            start, end = batch.stretches[0].start, batch.stretches[-1].end
            reads.append(RangeRead(batch.file, start, end - start, partial(self._read, turn, number)))
        try:
            with self._open_files() as self._files:
                self._files.read_all(reads, batch_bytes=1)
        except Exception as error:  # whatever it is, the others must not wait for what was to be read
            self._fail(error)
        for number in self._owned:
            if number not in self._blocks:
                self._put(number, None)

    def _read(self, turn: int, number: int) -> None:
        """Read a batch, in its turn, if somebody still wants it."""
        self._await_turn(turn, number)
        block = None
        if self._waiting[number] and self._failures < _MOST_FAILURES:
            block = self._block()
            try:
                self._fill(self._plan[number], block)
            except (CheckpointError, OSError) as error:
                self._free.append(block)
                block = None
                self._fail(error)
        self._put(number, block)

    def _await_turn(self, turn: int, number: int) -> None:
        until = self._until()
        with self._lock:
            while not self._moved.wait_for(partial(self._is_due, number, turn), self._waits / 2):
                if self._outside.now() > until:
                    raise TimeoutError(errno.ETIMEDOUT, f"nothing was fetched for {self._lasts:g} s")
                first = self._owned[self._first]
                if turn >= self._first + _HELD and first in self._blocks:  # nobody must wait for who fetches nothing
                    for rank in self._waiting[first] - {self._rank}:
                        logger.info("rank %d fetches nothing of rank %d, which keeps nothing for it", rank, self._rank)
                        self._release(rank, self._owned[self._first :])

    def _is_due(self, number: int, turn: int = 0) -> bool:
        """Whether a batch is to be read or fetched, or is wanted by nobody any more."""
        waiting = self._waiting[number]
        is_near = self._rank not in waiting or self._place[number] <= self._needed + _AHEAD
        return (is_near and turn < self._first + _HELD) or not waiting

    def _fill(self, batch: Batch, block: BatchBytes) -> None:
        block.sums.clear()
        for start, end, place, _ in batch.part_of(self._rank):
            part = block.view[place : place + end - start]
            if not self._files.fill(batch.file, part, start):
                raise CheckpointError(f"{batch.file} is too short.")
            block.sums.append(0 if self._checksum is None else self._checksum.of(part))

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        logger.log(level, "rank %d cannot read for others, which read that for themselves: %s", self._rank, error)

    # What others own

    def _fetch_all(self, owners: Sequence[int]) -> None:
        """Fetch what some ranks own, in its order. They are told at once: what they read waits for this rank."""
        with contextlib.ExitStack() as until_closed:
            for owner in owners:
                with self._giving_up(owner):
                    channel = until_closed.enter_context(contextlib.closing(self._connect(owner)))
                    channel.send({"ask": "join", "plan": self._number, "rank": self._rank}, self._until())
                    with self._lock:
                        self._channels[owner] = channel
                        if owner in self._lost:
                            channel.hang_up(listens=False)
            for number in self._wanted:
                owner, block = self._plan[number].reader, None
                if owner not in owners:
                    continue
                with self._lock:
                    is_wanted = (
                        self._moved.wait_for(partial(self._is_due, number), self._lasts) and self._waiting[number]
                    )
                if is_wanted:
                    with self._giving_up(owner):
                        block = self._fetch(number, self._channels[owner])
                    self._put(number, block)

    @contextlib.contextmanager
    def _giving_up(self, owner: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with self._lock:
                self._give_up(owner, error.strerror or str(error) or "it does not answer")
            if isinstance(error, (ConnectionResetError, ConnectionRefusedError, BrokenPipeError)):
                self.leave(owner)  # it has ended

    def _until(self) -> float:
        return self._outside.now() + self._lasts

    def _fetch(self, number: int, channel: Channel) -> BatchBytes | None:
        """Fetch a batch; None: it was not read, or was damaged. Raises OSError: nothing comes of its owner."""
        until = self._until()
        answer, _ = ask(channel, until, ask="batch", number=number)
        if answer["sums"] is None:
            return None
        block, is_whole = self._block(), True
        for (start, end, place, _), checksum in zip(
            self._plan[number].part_of(self._rank), answer["sums"], strict=True
        ):
            part = block.view[place : place + end - start]
            if not channel.receive_into(part, until):
                raise ConnectionResetError(errno.ECONNRESET, "its connection ended")
            is_whole &= self._checksum is None or self._checksum.of(part) == checksum
        if is_whole:
            return block
        self._free.append(block)
        text = "%s that rank %d served came damaged, and is read from storage"
        logger.warning(text, amount(self._plan[number].nbytes), self._plan[number].reader)
        return None


def ask(channel: Channel, until: float, **header: Any) -> tuple[dict[str, Any], memoryview]:
    """Ask a rank's server; returns its answer. Raises OSError: it has none, or says why not."""
    channel.send(header, until)
    frame = channel.receive(until)
    if frame is None:
        raise ConnectionResetError(errno.ECONNRESET, "its connection ended")
    if frame[0]["kind"] != "done":
        raise as_os_error(frame[0])
    return frame[0], frame[1]


_CONNECT_SECONDS, _SEND_SECONDS = 10.0, 10.0


class BatchServer(ConnectionServer):
    """Serves the batches that a rank owns, and what it wants, to ranks that know the secret of the job.

    Args:
        rank: this rank
        address: of this host
        secret: of the job
        waits: seconds to wait for a plan that others have made already
        outside: what this rank runs in

    Attributes:
        port: of TCP
        wants: what this rank wants, as it is told, by its digest

    Raises:
        OSError: it cannot listen
    """

    def __init__(self, rank: int, address: str, secret: str, waits: float, outside: Outside) -> None:
        super().__init__("share", outside)
        self._rank, self._waits = rank, waits
        self.wants: dict[str, bytes] = {}
        self._plan: tuple[int, SharedBatches | None] = 0, None
        self._changed = outside.condition()
        endpoint = PeerEndpoint(address, secret, outside)
        self.port = endpoint.port
        self.open(endpoint)

    def serve(self, number: int, batches: SharedBatches | None) -> None:
        """Serve the batches of a plan, in the place of those of the last one; None: this rank owns none."""
        with self._changed:
            self._plan = number, batches
            self._changed.notify_all()

    def answer(self, channel: Channel) -> None:
        """Answer a rank, until its connection ends: then it fetches nothing more."""
        joined = list[tuple[SharedBatches, int]]()

        def join(request: FrameRequest) -> None:
            with self._changed:
                self._changed.wait_for(lambda: self._plan[0] >= request.header["plan"], self._waits)
                number, batches = self._plan
            if number != request.header["plan"] or batches is None:
                raise OSError(errno.ENOENT, f"rank {self._rank} does not take part")
            joined.append((batches, request.header["rank"]))

        def batch(request: FrameRequest) -> Iterator[Reply]:
            batches, rank = joined[-1]
            return batches.serve(request.channel, rank, request.header["number"])

        def wants(request: FrameRequest) -> Reply:
            return Reply(blobs=[self.wants[request.header["digest"]]])

        handlers, seconds = {"batch": batch}, _SEND_SECONDS
        try:
            answer_requests(channel, handlers, wants, notes={"join": join}, field="ask", seconds=seconds, traced=False)
        finally:
            for batches, rank in joined:
                batches.leave(rank)


_MAX_THREADS = 4
#: Items are aligned to pages: what is between them is read too.
_PADDING_BYTES = 4096


class FetchedFiles(FileSet):
    """The files of a folder. What `read_all` reads comes from the rank that reads it for all, or else from storage.

    Every rank calls `read_all` as often, or takes part in its other ways.

    Args:
        folder: folder of the checkpoint
        files: the same files in storage, owned by this object
        plan: plans what all ranks want now, given what this one does; returns the batches, or None: this rank reads by
            itself
    """

    _batch_bytes = MOST_BYTES

    def __init__(self, folder: str, files: FileSet, plan: Callable[[Wanted], SharedBatches | None]) -> None:
        super().__init__(folder, files.outside)
        self._files = files
        self._plan = plan
        self._batches: SharedBatches | None = None
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
        if self._batches is None:
            return self._files.fill_block(name, offset, length)
        return super().fill_block(name, offset, length)

    def fill(self, name: str, buffer: memoryview, offset: int) -> bool:
        """Fill a buffer with what comes, and from storage with what does not."""
        batches, end = self._batches, offset + buffer.nbytes
        if batches is None or any(each[0] == name and each[1] < end and offset < each[2] for each in self._again):
            return self._files.fill(name, buffer, offset)
        for coming in batches.ranges(name, offset, end):
            start, stop = max(coming.start, offset), min(coming.end, end)
            part = buffer[start - offset : stop - offset]
            if not batches.copy(coming, start, part) and not self._files.fill(name, part, start):
                return False
        return True

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
        batch_bytes: float = math.inf,
    ) -> None:
        """Read what all ranks want together; see `FileSet.read_all`."""
        wanted: dict[str, list[tuple[int, int]]] = defaultdict(list)
        ordered = sorted(reads, key=attrgetter("file", "offset", "length"))
        for name, start, end in extents_of(ordered, _PADDING_BYTES):
            if start < end:
                wanted[name].append((start, end))
        self._batches = self._plan(wanted)
        if self._batches is None:
            self._files.read_all(reads, progress, inside=inside, batch_bytes=batch_bytes)
            return
        try:
            self._batches.start(reads)
            super().read_all(reads, progress, inside=inside, batch_bytes=batch_bytes)
        finally:
            self._batches.drain()
            self._batches = None

    def _choose_ways(self, ordered: Sequence[RangeRead]) -> int:
        return min(os.cpu_count() or 1, _MAX_THREADS, len(ordered))

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._files.__exit__(*exception)


class ReadOnce(SharedReads):
    """See the top of this file. The ranks meet whenever one of them reads, until all have read what they want.

    Args:
        ranks: the ranks, which make their loads in the same order
        timeouts: `stall`: a rank that serves nothing for so long is given up; others as for `CollectiveLoad`
    """

    def __init__(self, ranks: Coordinator, timeouts: ResolvedTimeouts) -> None:
        self._ranks, self._timeouts, self._outside = ranks, timeouts, ranks.outside
        self._lasts = timeouts.stage + timeouts.write
        self._server: BatchServer | None = None
        #: Of all ranks; and by which they know each other.
        self._addresses, self._ports, self._secret = list[str](), list[int](), ""
        self._reads_alone = self._is_cut = False
        #: The load whose meeting has failed, on all ranks; how many there were; what was read since the last one.
        self._failed, self._meetings = "", 0
        self._batches: SharedBatches | None = None

    def opens(self, tag: str, open_files: OpenFiles, index: Index, verified: bool) -> OpenFiles:
        """Files whose reads all ranks of this load plan together."""
        checksum = None if verified and index.manifest is not None else fastest()

        def opened(folder: str) -> FileSet:
            plan = partial(self._plan, tag, partial(open_files, folder), index, checksum)
            return FetchedFiles(folder, open_files(folder), plan)

        return opened

    def end_reads(self, tag: str) -> None:
        """Meet the others until all have read."""
        while self._meet(tag):
            pass

    def close(self) -> None:
        """Serve nothing more; each rank reads by itself from now on."""
        self._reads_alone = True
        if self._server is not None:
            self._server.close(self._timeouts.close)

    def _meet(self, tag: str, wanted: bytes = b"") -> dict[str, list[int]]:
        """Meet the other ranks.

        Args:
            tag: of the load
            wanted: what this rank wants; empty: it has read all that it wants

        Returns:
            The ranks that want the same, by its digest. Empty: all have read, or each reads by itself.

        Raises:
            RanksError, CheckpointTimeoutError: a rank is dead, or does not come
        """
        if self._reads_alone or tag == self._failed:
            return {}
        self._meetings += 1
        question, digest = f"{tag}/together/{self._meetings}", hashlib.sha256(wanted).hexdigest() if wanted else ""
        before, self._batches = self._batches, None
        try:
            if not self._addresses:
                self._introduce(question)
            if self._server is not None:
                self._server.wants[digest] = wanted
            value = [0 if self._server is None or self._is_cut else self._server.port, digest]
            met = self._ranks.decide(question, value, _met, self._outside.now() + self._lasts)
        except CheckpointError:
            self._failed = tag  # so none comes to a further one
            raise
        finally:
            if before is not None:  # each rank has what was served since they met last
                before.end(self._timeouts.close)
        if met is None or self._server is None:
            self.close()
            return {}
        self._server.wants, self._ports = {digest: wanted}, met[0]
        return dict(met[1])

    def _introduce(self, question: str) -> None:
        """Let the ranks know each other's addresses, at the first meeting, and serve."""
        decide, until = partial(_addresses, self._outside), self._outside.now() + self._lasts
        offered = offered_address(self._outside)
        self._addresses, self._secret = self._ranks.decide(f"{question}/addresses", offered, decide, until)
        rank, seconds = self._ranks.rank, self._timeouts.stall
        try:
            if self._addresses:
                self._server = BatchServer(rank, self._addresses[rank], self._secret, seconds, self._outside)
        except OSError as error:
            logger.warning("rank %d: %s", rank, error.strerror or error)

    def _channel(self, rank: int) -> Channel:
        """Connect to a rank's server; raises OSError."""
        to = PeerAddress(f"the host of rank {rank}", self._addresses[rank], self._ports[rank], rank)
        try:
            return connect_to_peer(to, self._secret, _CONNECT_SECONDS, self._outside)
        except (TimeoutError, ConnectionRefusedError):
            self._is_cut = True  # the ranks read by themselves after their next meeting, if it is alive
            raise

    def _plan(
        self, tag: str, open_files: Callable[[], FileSet], index: Index, checksum: Checksum | None, wanted: Wanted
    ) -> SharedBatches | None:
        """What all ranks read together that now read the same checkpoint; None: there is nothing for this one."""
        identity, rank = _identity(index), self._ranks.rank
        own = json.dumps([identity, wanted]).encode()
        met = self._meet(tag, own)
        if self._server is None or not met:
            return None
        wants = dict[int, Wanted]()
        try:
            with self._outside.pool(_MOST_THREADS, "ckpt-share-wants") as pool:
                told = pool.map(lambda each: own if rank in each[1] else self._told(each[0], each[1][0]), met.items())
            for ranks, (other, ranges) in zip(met.values(), map(json.loads, told), strict=True):
                if other == identity:
                    ranges = {name: [(start, end) for start, end in each] for name, each in ranges.items()}
                    wants.update(dict.fromkeys(ranks, ranges))
        except OSError as error:
            logger.warning("rank %d reads all by itself: what others want cannot be told (%s)", rank, error)
            wants = {}
        plan = plan_reads(dict(sorted(wants.items())))
        if self._ranks.is_leader and plan:
            shared, all_bytes = (sum(batch.nbytes for batch in plan if len(batch.ranks) > n) for n in (1, 0))
            text = "%d ranks read %s together; %s of it are wanted by several, and read by one"
            logger.info(text, len(wants), amount(all_bytes), amount(shared))
        takes_part = ({*batch.ranks, batch.reader} for batch in plan)
        if any(rank in ranks and len(ranks) > 1 for ranks in takes_part):
            about = rank, self._channel, open_files, checksum, self._outside, self._timeouts
            self._batches = SharedBatches(plan, self._meetings, *about)
        self._server.serve(self._meetings, self._batches)
        return self._batches

    def _told(self, digest: str, rank: int) -> bytes:
        """What another rank wants; raises OSError."""
        with contextlib.closing(self._channel(rank)) as channel:
            return bytes(ask(channel, self._outside.now() + self._timeouts.stall, ask="wants", digest=digest)[1])


def _addresses(outside: Outside, offered: Sequence[str]) -> tuple[list[str], str]:
    """On the leading rank: where each rank is reached, and a secret. Empty: one of them is not."""
    try:
        addresses = [] if "" in offered else reachable(offered, outside)
    except OSError as error:
        logger.warning("the address by which other hosts reach this one cannot be found: %s", error)
        addresses = []
    return addresses, outside.random_bytes(32).hex()


def _met(values: Sequence[Any]) -> tuple[list[int], dict[str, list[int]]] | None:
    """On the leading rank: the ports of all ranks, and who wants the same; None, with a warning: they read alone."""
    ports, wants = [port for port, _ in values], defaultdict[str, list[int]](list)
    if 0 in ports:
        logger.warning(
            "all ranks read by themselves: other hosts do not reach rank %d, or it does not reach them (see its log); "
            "set MASTER_ADDR to a name that all hosts know, or checkpoint.read_once=off",
            ports.index(0),
        )
        return None
    for rank, (_, digest) in enumerate(values):
        if digest:
            wants[digest].append(rank)
    return ports, wants


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
