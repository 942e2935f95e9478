"""Snapshot servers on other hosts: how their files are read, and how replicas of these are pulled.

- `PeerClient`: one of them, over TCP. Bytes come when they are first read. A load opens files more than once, as it
  verifies all bytes before it changes a tensor. So what came stays in memory until `forget`, when the load is over: no
  byte is sent twice, and what is used is what was verified.
- `ReplicaPull`: replicas are pulled by the server that is to have them, from the server of their home. They are read as
  a restore reads, and what comes is compared with the checksums of the home's integrity file, which comes within an
  answer, as small files do: between hosts, answers are signed. Bytes that belong to no item, such as headers and
  padding, have no checksum there: they come once more, within an answer. Files that are here already, by their path or
  identity, are linked. A replica is kept when all of it is right.
- `ReplicaMemory`: memory for replicas is allocated ahead of their bytes, and used again. New memory is slow to come:
  each page of it is cleared, and in a virtual machine perhaps fetched from the host.

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import weakref
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from ..core.commit.names import integrity_name
from ..core.outside import OUTSIDE, Latch, Outside
from ..core.pages import SharedPages, align, map_private
from ..core.processes.framing import Channel
from ..core.storage.checksum import Checksum, find_checksum
from ..core.writing.range_writer import SumCursor, Throttle
from ..core.writing.request import Extent
from ..formats.rank_index import parse_rank_index
from .client import ANSWER_SECONDS, Opening, SnapshotClient
from .stores import ImageRange, MemoryStore, ReadableFile
from .wire import PeerAddress, connect_to_peer

#: Bytes of a request. Others wait for one thread's, so it is short; the way back and forth takes 0.1 ms of its 5.
_CHUNK_BYTES = 4 << 20


class PeerClient(SnapshotClient):
    """See the top of this file.

    Args:
        address: where it is
        secret: of its run
        now: connect now; False: with the first request
        seconds: how long it may take to answer
        outside: of this process

    Attributes:
        address: see above

    Raises:
        OSError: see `_dial`
    """

    def __init__(
        self,
        address: PeerAddress,
        secret: str,
        *,
        now: bool = True,
        seconds: float = ANSWER_SECONDS,
        outside: Outside = OUTSIDE,
    ) -> None:
        super().__init__(address.rank, str(address), seconds, outside)
        self.address, self._secret = address, secret
        #: Memory for images, and which chunks have come, by folder and name. A file in memory never changes.
        self._fetched: dict[tuple[str, str], tuple[memoryview, bytearray]] = {}
        if now:
            self.reach()

    def _dial(self) -> Channel:
        return connect_to_peer(self.address, self._secret, min(self._seconds, ANSWER_SECONDS), self._outside)

    def opened(self, folder: str) -> AbstractContextManager[Mapping[str, FetchedFile]]:
        return self._opened(folder, self._file_of, descriptors=False)

    def _file_of(self, opening: Opening, name: str, source: int, base: int, **about: Any) -> FetchedFile:
        length, key = about["length"], (opening.folder, name)
        memory, has_come = self._fetched.get(key, (None, bytearray()))
        if memory is None or memory.nbytes != length:
            memory = memoryview(map_private(length) if length else b"")  # taken as far as bytes come
            has_come = bytearray(-(-length // _CHUNK_BYTES))
            self._fetched[key] = memory, has_come
        return FetchedFile(**about, client=self, opening=opening, name=name, memory=memory, has_come=has_come)

    def forget(self) -> None:
        """Free the memory of what has come, once nobody reads it any more."""
        self._fetched.clear()

    def close(self) -> None:
        """Hang up, and free the memory."""
        super().close()
        self.forget()


@dataclass(frozen=True, kw_only=True)
class FetchedFile(ReadableFile):
    """A file of a `PeerClient`.

    Attributes:
        client: has it
        opening: with which it was opened
        name: its name
        memory: for its image
        has_come: which chunks of that have come
    """

    client: PeerClient
    opening: Opening
    name: str
    memory: memoryview
    has_come: bytearray
    is_here: ClassVar[bool] = False

    def fill_image(self, buffer: memoryview, offset: int) -> bool:
        end = offset + buffer.nbytes
        for chunk in _chunks(offset, end):
            if not self.has_come[chunk]:
                with self.client.lock:  # who has it waits for an answer, which has a deadline
                    if not self.has_come[chunk]:
                        start = chunk * _CHUNK_BYTES
                        part = self.memory[start : start + _CHUNK_BYTES]
                        deque(self.stream(start, part.nbytes, [part]), 0)
                        self.has_come[chunk] = True
        buffer[:] = self.memory[offset:end]
        return True

    def stream(self, offset: int, length: int, buffers: Iterable[memoryview]) -> Iterator[memoryview]:
        """Receive bytes before the tail once more, by one request; see `SnapshotClient.stream`.

        Args:
            offset: of the first byte
            length: number of bytes
            buffers: where they go, one after the other
        """
        what = {"number": self.opening.number, "name": self.name, "offset": offset, "length": length}
        return self.client.stream(self.opening.channel, buffers, "read", **what)

    def ranges(self, places: bytes) -> memoryview:
        """Bytes of short ranges before the tail, one after the other, within a signed answer.

        Args:
            places: offset, length, offset, length, and so on, in 64 bits each
        """
        opening = self.opening
        return self.client.ask("ranges", places, on=opening.channel, number=opening.number, name=self.name)[1]

    def forget(self, offset: int, length: int) -> None:
        with self.client.lock:
            for chunk in _chunks(offset, min(offset + length, self.length)):
                self.has_come[chunk] = False


def _chunks(start: int, end: int) -> range:
    """The numbers of the chunks that have some of a range."""
    return range(start // _CHUNK_BYTES, -(-end // _CHUNK_BYTES))


@dataclass(eq=False)
class ReplicaBlock:
    """Memory that has the images of a replica, or had; freed with this object, unless files are in it.

    Attributes:
        nbytes: its size
        name: of its server, for errors
        outside: of its server
        source: its number in `MemoryStore`, a new one for each replica
        pages: its pages, which are allocated in a thread
        fd: its descriptor
    """

    nbytes: int
    name: str
    outside: Outside
    source: int = 0

    def __post_init__(self) -> None:
        self.pages = SharedPages(self.nbytes, self.outside)
        self.fd = self.pages.fd
        weakref.finalize(self, os.close, self.fd).atexit = False

    def part(self, start: int, end: int, deadline: float) -> memoryview:
        """The memory from `start` to `end`, when it is allocated.

        Raises:
            TimeoutError: it is not, or the deadline has passed
            OSError: there is not enough memory
        """
        if self.outside.now() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "it was not here in time")
        try:
            self.pages.wait(end, deadline)
        except TimeoutError:
            raise
        except OSError as error:
            raise OSError(error.errno, f"{self.name} has no memory for a replica: {error.strerror}") from error
        return self.pages.memory[start:end]


@dataclass(eq=False)
class ReplicaMemory:
    """The blocks of all ranks of which a server keeps replicas. Thread-safe.

    Attributes:
        files: of this server
        name: of this server, for errors
        available: returns how many bytes of memory are free
        outside: of this server
    """

    files: MemoryStore
    name: str
    available: Callable[[], int]
    outside: Outside = OUTSIDE

    def __post_init__(self) -> None:
        self._lock = self.outside.lock()
        #: By home, without those into which a replica is on its way.
        self._blocks: dict[int, list[ReplicaBlock]] = {}

    @contextlib.contextmanager
    def block(self, home: int, nbytes: int) -> Iterator[ReplicaBlock]:
        """Memory for a replica, into which nothing else comes until it is free of files again.

        It may still be being allocated, in a thread.

        Args:
            home: whose replica it is
            nbytes: of its images

        Raises:
            OSError: there is not enough memory
        """
        with self._lock:
            blocks = self._blocks.pop(home, [])
            unused = [block for block in blocks if not self.files.has_source(block.source)]
            self._blocks[home] = [block for block in blocks if block not in unused]
            found = next((block for block in unused if nbytes <= block.nbytes < 2 * nbytes), None)
            del blocks, unused  # which frees the others
            if found is None and nbytes > (left := self.available()):
                text = f"{self.name} has {left} bytes of memory left, too few for a replica of {nbytes}"
                raise OSError(errno.ENOMEM, text)
            block = found or ReplicaBlock(nbytes, self.name, self.outside)
            block.source = self.files.new_source()
        with ExitStack() as until_filled:
            if not found:
                pool = until_filled.enter_context(self.outside.pool(1, "ckpt-pages"))
                pool.submit(block.pages.allocate, 1)  # what goes wrong there is raised by `part`
                until_filled.callback(block.pages.stop)
            yield block
        with self._lock:
            self._blocks[home].append(block)


#: Bytes to receive and sum at once, which fit into a processor's cache.
_PART_BYTES = 1 << 20
#: Bytes of a request, the most and the least; at a limited rate those of a tenth of a second, so they come steadily.
_RUN_BYTES, _LEAST_RUN_BYTES = 64 << 20, 64 << 10


#: Of the items of a file, as its index has them, in order: offset, length, offset, length, and so on; their checksums.
_Items: TypeAlias = "tuple[array[int], list[int]]"


@dataclass(frozen=True)
class ReplicaPull:
    """Pulls a replica of what a rank on another host has of its own files of a snapshot.

    Attributes:
        memory: where replicas are in this process
        home: the server of that rank
        secret: of the run
        rate: most bytes to ask for in a second; None: no limit
        until: deadline, in seconds of `Outside.now`
        checksum_home: where the package of the run's checksum is installed
        outside: of this process
        ended: set when this process ends, which nothing that is pulled may delay; None: it does not
    """

    memory: ReplicaMemory
    home: PeerAddress
    secret: str
    rate: float | None
    until: float
    checksum_home: str | None = None
    outside: Outside = OUTSIDE
    ended: Latch | None = None

    def pull(self, path: str) -> int:
        """Keep the files of a snapshot, in the place of all that is here of them from this rank.

        Args:
            path: of the snapshot

        Returns:
            How many bytes of images have come, and were not linked.

        Raises:
            FileNotFoundError: nothing of the snapshot is there
            PermissionError: the server belongs to another run
            TimeoutError: it does not come in time
            ConnectionAbortedError: this process ends
            OSError: the server is gone, there is no memory here, or what has come is damaged
        """
        rank, files = self.home.rank, self.memory.files
        seconds = min(ANSWER_SECONDS, max(self.until - self.outside.now(), 0.001))
        client = PeerClient(self.home, self.secret, seconds=seconds, outside=self.outside)
        with contextlib.closing(client), ExitStack() as until_kept:
            dates = {file.path: file.modified for file in client.listed(path) if file.home is None}
            found = dict[str, FetchedFile]()
            for folder in dict.fromkeys(map(os.path.dirname, dates)):
                opened = until_kept.enter_context(client.opened(folder))
                found |= {os.path.join(folder, name): file for name, file in opened.items()}
            if not dates or dates.keys() - found.keys():
                raise FileNotFoundError(errno.ENOENT, f"{self.home} does not have it, so there is no replica", path)
            checksum, items = self._index(found)
            contents = {file: ImageRange(found[file].tail) for file in dates if not found[file].length}
            images = {file: found[file] for file in dates if found[file].length}
            wanted = {file: (image.length, image.identity) for file, image in images.items()}
            for file, place in until_kept.enter_context(files.linked(rank, wanted)).items():
                image = images.pop(file)
                contents[file] = place._replace(tail=image.tail, identity=image.identity)
            base, source, nbytes = 0, None, sum(align(image.length) for image in images.values())
            if images:
                block = until_kept.enter_context(self.memory.block(rank, nbytes))
                source = block.source, block.fd
                for file, image in images.items():
                    self._receive(file, image, block, base, checksum, items[file])
                    contents[file] = ImageRange(image.tail, block.source, base, image.length, image.identity)
                    base += align(image.length)
            dated = {file: contents[file]._replace(modified=date) for file, date in dates.items()}
            files.put_replica(rank, path, dated, source)
        return client.received

    def _index(self, found: Mapping[str, FetchedFile]) -> tuple[Checksum, Mapping[str, _Items]]:
        """What the home's integrity file says: the algorithm, and the items of each image, in order, by its path.

        Raises:
            OSError: it is not there, or the files are not those that it lists
        """
        name, algorithm = integrity_name(self.home.rank), ""
        items = defaultdict[str, _Items](lambda: (array("Q"), []))
        for path, about in found.items():
            folder, last = os.path.split(path)
            if last != name:
                continue
            content = json.loads(about.tail)
            for entry in content["files"]:
                file = found.get(os.path.join(folder, entry["name"]))
                if (size := 0 if file is None else file.size) != entry["size"]:
                    text = f"{self.home} has {size} bytes of it, and by {name} they are {entry['size']}"
                    raise OSError(errno.EBADMSG, text, entry["name"])
            index = parse_rank_index(content, {entry["name"]: entry for entry in content["files"]})
            tensors, algorithm = index.tensors, index.checksum
            columns = zip(tensors.files, tensors.offsets, tensors.lengths, tensors.checksums, strict=True)
            for number, offset, length, value in sorted(columns):
                places, sums = items[os.path.join(folder, tensors.names[number])]
                places.extend((offset, length))
                sums.append(value)
        if not algorithm:
            raise FileNotFoundError(errno.ENOENT, f"{self.home} does not have {name}, by which files are verified")
        return find_checksum(algorithm, self.checksum_home), items

    def _receive(
        self, path: str, file: FetchedFile, block: ReplicaBlock, base: int, checksum: Checksum, items: _Items
    ) -> None:
        """Receive the bytes of a file into a block, and compare them."""
        places, sums = items
        found = [checksum.of(memoryview(b""))] * len(sums)
        cursor = SumCursor(Extent(0, 0, file.length, 0, memoryview(places)), checksum, found)
        self._sum(self._arriving(path, file, block, base), cursor)
        others, memory = _between(places, file.length), block.part(base, base + file.length, self.until)
        between = (memory[start:][:count] for start, count in zip(others[::2], others[1::2], strict=True))
        came = zip(places[::2], sums, found, strict=True)
        bad = [f"the item at byte {offset}" for offset, right, value in came if value != right]
        if others and file.ranges(others.tobytes()) != b"".join(between):
            bad.append("what lies between its items")
        if bad:
            text = f"{bad[0]} was damaged on its way to {self.memory.name}: the bytes do not match their checksum"
            raise OSError(errno.EBADMSG, text, path)

    def _arriving(self, path: str, file: FetchedFile, block: ReplicaBlock, base: int) -> Iterator[memoryview]:
        """Ask for the bytes of a file, and receive them into a block."""
        rate, throttle = math.inf if self.rate is None else self.rate, Throttle(self.rate, self.outside, self.ended)
        run_bytes = int(max(min(rate / 10, _RUN_BYTES), _LEAST_RUN_BYTES))
        for start in range(0, file.length, run_bytes):
            length, left = min(run_bytes, file.length - start), self.until - self.outside.now()
            if left <= 0 or rate * left < length:
                raise TimeoutError(errno.ETIMEDOUT, f"{self.home} does not send it in time; it is too slow", path)
            throttle.wait(length)
            if self.ended is not None and self.ended.is_set:
                raise ConnectionAbortedError(errno.ECONNABORTED, f"{self.memory.name} has ended", path)
            end, starts = base + start + length, range(base + start, base + start + length, _PART_BYTES)
            parts = (block.part(at, min(at + _PART_BYTES, end), self.until) for at in starts)
            yield from file.stream(start, length, parts)

    def _sum(self, parts: Iterator[memoryview], cursor: SumCursor) -> None:
        """Receive and sum parts, by two threads in turn: each sums its part while the other receives.

        So a part is summed by the processor that has it in its cache, and no thread waits until another one wakes up.
        """
        receiving, summing = self.outside.lock(), self.outside.lock()

        def work(_: int) -> None:
            while True:
                with ExitStack() as turn:
                    with receiving:
                        part = next(parts, None)
                        if part is None:
                            return
                        turn.enter_context(summing)  # before another one comes, so that they stay in their order
                    cursor.feed([part])

        with self.outside.pool(2, "ckpt-replica") as pool:
            list(pool.map(work, range(2)))


def _between(places: array[int], length: int) -> array[int]:
    """Offset, length, offset, length, and so on, of what belongs to no item of a file; `places` are those of items."""
    others, position = array("Q"), 0
    for offset, count in [*zip(places[::2], places[1::2], strict=True), (length, 0)]:
        if offset > position:
            others.extend((position, offset - position))
        position = max(position, offset + count)
    return others
