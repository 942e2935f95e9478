"""Replicas are pulled by the server that is to have them, from the server of their home.

They are read as a restore reads, and what comes is compared with the checksums of the home's integrity file, which
comes within an answer, as small files do: between hosts, answers are signed. Bytes that belong to no item, such as
headers and padding, have no checksum there: they come once more, within an answer. Files that are here already, by
their path or identity, are linked. A replica is kept when all of it is right. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ..core.commit.names import integrity_name
from ..core.outside import OUTSIDE, Latch, Outside
from ..core.pages import align
from ..core.storage.checksum import Checksum, find_checksum
from ..core.writing.range_writer import SumCursor, Throttle
from ..core.writing.request import Extent
from ..formats.rank_index import parse_rank_index
from .client import ANSWER_SECONDS, FetchedFile, PeerClient
from .host_memory import ReplicaBlock, ReplicaMemory
from .stores import ImageRange
from .wire import PeerAddress

#: Bytes to receive and sum at once, which fit into a processor's cache.
_PIECE_BYTES = 1 << 20
#: Bytes of a request, the most and the least; at a limited rate those of a tenth of a second, so they come steadily.
_RUN_BYTES, _LEAST_RUN_BYTES = 64 << 20, 64 << 10


class PullResult(NamedTuple):
    """What was pulled.

    Attributes:
        bytes: size of all files
        sent: bytes of images that have come, and were not linked
    """

    bytes: int
    sent: int


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

    def pull(self, path: str) -> PullResult:
        """Keep the files of a snapshot, in the place of all that is here of them from this rank.

        Args:
            path: of the snapshot

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
            files.put_replica(rank, path, {file: (contents[file], date) for file, date in dates.items()}, source)
        return PullResult(sum(content.size for content in contents.values()), client.received)

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
            end, starts = base + start + length, range(base + start, base + start + length, _PIECE_BYTES)
            pieces = (block.part(at, min(at + _PIECE_BYTES, end), self.until) for at in starts)
            yield from file.stream(start, length, pieces)

    def _sum(self, pieces: Iterator[memoryview], cursor: SumCursor) -> None:
        """Receive and sum pieces, by two threads in turn: each sums its piece while the other receives.

        So a piece is summed by the processor that has it in its cache, and no thread waits until another one wakes up.
        """
        receiving, summing = self.outside.lock(), self.outside.lock()

        def work(_: int) -> None:
            while True:
                with ExitStack() as turn:
                    with receiving:
                        piece = next(pieces, None)
                        if piece is None:
                            return
                        turn.enter_context(summing)  # before another one comes, so that they stay in their order
                    cursor.feed([piece])

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
