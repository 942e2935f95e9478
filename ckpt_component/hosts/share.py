"""Each byte that several hosts want is read by one of them: `ReadOnce`, in a load that all ranks make.

It begins where files are read in many ranges at once (`FileSet.read_all`), whatever these ranges become: tensors, parts
of tensors in any sharding, objects. All ranks meet there, tell which ranges they want, make the same plan, and read by
it. They meet until all have read what they want, however often each one reads.

A file is cut by a grid. What the ranks want of a cell is a batch: one rank owns it, reads it, and serves every other
rank the bytes of it which that rank wants, over the signed connections of `wire` (`SharedBatches`).

Each rank has a quota: its part of all bytes, less what it alone wants and therefore reads anyway. Batch by batch, that
rank reads which has used the smallest part of its quota, so all read at the same time, near each other in the files.

Checksums of the checkpoint are compared by every rank, for all that it takes. So they find what was damaged in storage,
in the memory of its owner, or on its way; the rank then reads these bytes from storage. Bytes without such checksums
are served with one, as nothing else would tell that they were damaged on their way.
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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import IO, Any

from ..core.coordination import Coordinator
from ..core.coordination.connection import offered_address, reachable
from ..core.options import ResolvedTimeouts
from ..core.pages import ScratchBlock
from ..core.processes.framing import Channel
from ..core.processes.serve import FrameRequest, Reply
from ..core.storage.checksum import Checksum, fastest
from ..core.storage.file_set import FileSet, RangeRead, extents_of
from ..core.storage.safe_open import read_failure
from ..core.storage.space import amount
from ..errors import CheckpointError
from ..formats.index import Index
from ..loading.collective import OpenFiles, SharedReads
from .batches import MOST_THREADS, Batch, SharedBatches, Stretch
from .peer_client import PeerClient
from .server import ConnectionServer, PeerEndpoint, Table
from .wire import PeerAddress

logger = logging.getLogger("ckpt_component.readers")

#: By file: what is wanted of it, as ranges (start, end) in order, without overlaps.
Wanted = Mapping[str, Sequence[tuple[int, int]]]

#: Most bytes of a batch, and least ones of a cell of the grid, which page-aligned reads suit. Passing a batch on takes
#: as much time of processors as about 1 MB of its bytes, so few large ones are better.
MOST_BYTES, LEAST_BYTES = 23 << 18, 64 << 10
#: A rank has at least so many cells, as far as they are not too small: it reads at most a part of them too much.
_CELLS_OF_RANK = 20


def plan_reads(wants: Mapping[int, Wanted]) -> list[Batch]:
    """Plan reads such that each byte is read once, by ranks that read about equally much.

    No rank reads more than a cell above the larger of two: what it alone wants, and the average of all ranks.

    Args:
        wants: by rank, in order of the ranks: what it wants. Each of these ranks can read all the files.

    Returns:
        The batches by file and place, the same on all ranks that have the same `wants`.
    """
    files = _stretches(wants)
    even = -(-sum(end - start for each in files.values() for start, end, _ in each) // max(len(wants), 1))
    cell = min(max(even // _CELLS_OF_RANK // LEAST_BYTES, 1) * LEAST_BYTES, MOST_BYTES)
    plan = [Batch(name, each, _only_rank(each)) for name in sorted(files) for each in _cells(files[name], cell)]
    quotas = dict.fromkeys(wants, even)
    for batch in plan:
        if batch.reader != _NO_RANK:
            quotas[batch.reader] -= batch.nbytes
    least_used = _LeastUsed(quotas)
    return [batch if batch.reader != _NO_RANK else least_used.reads(batch) for batch in plan]


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


class _LeastUsed:
    """Finds the rank that has used the smallest part of its quota.

    Args:
        quotas: bytes that each rank is to read; what is not above 0 is used up
    """

    def __init__(self, quotas: Mapping[int, int]) -> None:
        self._quotas = quotas
        #: Bytes that each rank reads so far, which only grow.
        self._used = dict.fromkeys(quotas, 0)
        #: By the ranks to choose from: a heap of them, by the part that was used when they were put there.
        self._heaps: dict[tuple[int, ...], list[tuple[float, int]]] = {}

    def reads(self, batch: Batch) -> Batch:
        """A batch that several ranks want, with its reader."""
        wanting = dict.fromkeys(each.ranks for each in batch.stretches)
        reader, has_enough = self._among(tuple(sorted({*itertools.chain.from_iterable(wanting)})))
        if has_enough:  # else who wants it need not be sent it
            reader, _ = self._among(tuple(self._quotas))
        self._used[reader] += batch.nbytes
        return batch._replace(reader=reader)

    def _among(self, ranks: tuple[int, ...]) -> tuple[int, bool]:
        """The rank, of these, and whether it has used up its quota."""
        if ranks not in self._heaps:
            self._heaps[ranks] = sorted((self._part(rank), rank) for rank in ranks)
        heap = self._heaps[ranks]
        while (now := self._part(heap[0][1])) != heap[0][0]:
            heapq.heapreplace(heap, (now, heap[0][1]))
        return heap[0][1], now >= 1

    def _part(self, rank: int) -> float:
        quota = self._quotas[rank]
        return self._used[rank] / quota if quota > 0 else math.inf


_NO_RANK = -1


def _only_rank(stretches: Sequence[Stretch]) -> int:
    """The rank that alone wants all of these, or `_NO_RANK`."""
    first = stretches[0].ranks
    return first[0] if len(first) == 1 and all(stretch.ranks == first for stretch in stretches) else _NO_RANK


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

    def read_all(self, reads: Sequence[RangeRead], *args: Any, **options: Any) -> None:
        """Read what all ranks want together; see `FileSet.read_all`."""
        wanted: dict[str, list[tuple[int, int]]] = defaultdict(list)
        ordered = sorted(reads, key=attrgetter("file", "offset", "length"))
        for name, start, end in extents_of(ordered, _PADDING_BYTES):
            if start < end:
                wanted[name].append((start, end))
        self._batches = self._plan(wanted)
        if self._batches is None:
            self._files.read_all(reads, *args, **options)
            return
        try:
            self._batches.start(reads)
            super().read_all(reads, *args, **options)
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
        self._server: ConnectionServer | None = None
        #: Its port, and how all ranks reach each other.
        self._port, self._addresses, self._ports, self._secret = 0, list[str](), list[int](), ""
        self._reads_alone = False
        #: The load whose meeting has failed, on all ranks; how many there were.
        self._failed, self._meetings = "", 0
        #: What this rank wants, as it is told, by its digest; the last plan, by its number, whose batches it serves.
        self._wants = dict[str, bytes]()
        self._served: tuple[int, SharedBatches | None] = 0, None
        self._changed = self._outside.condition()

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
        self._wants[digest] = wanted
        try:
            if not self._addresses:
                self._introduce(question)
            met = self._ranks.decide(question, [self._port, digest], _met, self._outside.now() + self._lasts)
        except CheckpointError:
            self._failed = tag  # so none comes to a further one
            raise
        finally:
            if (before := self._served[1]) is not None:  # each rank has what was served since they met last
                before.end(self._timeouts.close)
        if met is None:
            self.close()
            return {}
        self._wants, self._ports = {digest: wanted}, met[0]
        return dict(met[1])

    def _introduce(self, question: str) -> None:
        """Let the ranks know each other's addresses, at the first meeting, and serve."""
        outside, until = self._outside, self._outside.now() + self._lasts
        decide = lambda offered: [reachable(offered, outside), outside.random_bytes(32).hex()]  # noqa: E731
        offered = offered_address(outside)
        self._addresses, self._secret = self._ranks.decide(f"{question}/addresses", offered, decide, until)
        try:
            if "" not in self._addresses:
                endpoint = PeerEndpoint(self._addresses[self._ranks.rank], self._secret, self._outside)
                self._server = ConnectionServer("share", self._table, self._outside)
                self._server.open(endpoint)
                self._port = endpoint.port
        except OSError as error:
            logger.warning("rank %d: %s", self._ranks.rank, error.strerror or error)

    def _connect(self, rank: int, seconds: float) -> PeerClient:
        """Connect to a rank's server, which may take so long to answer; raises OSError."""
        to = PeerAddress(f"the host of rank {rank}", self._addresses[rank], self._ports[rank], rank)
        try:
            return PeerClient(to, self._secret, seconds=seconds, outside=self._outside)
        except (TimeoutError, ConnectionRefusedError):
            self._port = 0  # the ranks read by themselves after their next meeting, if it is alive
            raise

    def _plan(
        self, tag: str, open_files: Callable[[], FileSet], index: Index, checksum: Checksum | None, wanted: Wanted
    ) -> SharedBatches | None:
        """What all ranks read together that now read the same checkpoint; None: there is nothing for this one."""
        identity, rank = _identity(index), self._ranks.rank
        own = json.dumps([identity, wanted]).encode()
        met = self._meet(tag, own)
        if not met:
            return None
        wants = dict[int, Wanted]()
        try:
            with self._outside.pool(MOST_THREADS, "ckpt-share-wants") as pool:
                told = pool.map(lambda each: own if rank in each[1] else self._told(*each), met.items())
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
        batches, takes_part = None, ({*batch.ranks, batch.reader} for batch in plan)
        if any(rank in ranks and len(ranks) > 1 for ranks in takes_part):
            connect = partial(self._connect, seconds=self._lasts)
            about = connect, open_files, checksum, self._outside, self._timeouts
            batches = SharedBatches(plan, self._meetings, rank, *about)
        with self._changed:
            self._served = self._meetings, batches
            self._changed.notify_all()
        return batches

    def _told(self, digest: str, ranks: Sequence[int]) -> bytes:
        """What other ranks want, of which one is asked; raises OSError."""
        with contextlib.closing(self._connect(ranks[0], self._timeouts.stall)) as connection:
            return bytes(connection.ask("wants", digest=digest)[1])

    def _table(self, channel: Channel, until_closed: ExitStack) -> Table:
        """What answers a rank, until its connection ends: then it fetches nothing more."""
        joined = list[tuple[SharedBatches, int]]()

        def join(request: FrameRequest) -> None:
            with self._changed:
                self._changed.wait_for(lambda: self._served[0] >= request.header["plan"], self._timeouts.stall)
                number, batches = self._served
            if number != request.header["plan"] or batches is None:
                raise OSError(errno.ENOENT, f"rank {self._ranks.rank} does not take part")
            joined.append((batches, request.header["rank"]))
            until_closed.callback(batches.leave, request.header["rank"])

        def batch(request: FrameRequest) -> Iterator[Reply]:
            batches, rank = joined[-1]
            return batches.serve(channel, rank, request.header["number"])

        def wants(request: FrameRequest) -> Reply:
            return Reply(blobs=[self._wants[request.header["digest"]]])

        return {"batch": batch, "wants": wants}, {"join": join}


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
