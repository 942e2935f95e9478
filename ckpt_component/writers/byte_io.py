"""Run one write job: byte ranges of an image to files, in parallel, with checksums. Standard library alone.

This runs in the background writer process, which imports no torch, and as it is in the trainer for
`caller=inline`. A job is plain data: the layout table says which bytes go where; the source gives the bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib  # integrity files themselves have a crc32 in the manifest, whatever the items have
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ..storage.checksum import Checksum, Stream, find_checksum
from ..storage.fs import FsOps
from ..storage.names import integrity_name


class ByteSource(Protocol):
    """Where the bytes of an image come from: an arena, or the live tensors."""

    def buffers(self, start: int, end: int) -> list[memoryview]:
        """The bytes [start, end) of the image as one or more pieces, in order."""
        ...


class MemorySource:
    """An image that lies in memory as one block."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def buffers(self, start: int, end: int) -> list[memoryview]:
        """The one slice."""
        return [self._memory[start:end]]


@dataclass(frozen=True)
class FileSpec:
    """One file of the image: its name, where its bytes start in the image, and how many there are."""

    name: str
    base: int
    size: int


@dataclass(frozen=True)
class Lane:
    """What one parallel writer does: bytes [start, end) of a file, and the items that lie in there.

    `items` are (offset, length) in the file, ascending; `first` is the number of the first one among all items.
    """

    file: int
    start: int
    end: int
    first: int
    items: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class WriteTable:
    """The constant part of a rank's jobs: it is sent to the writer process once per structure.

    Attributes:
        files: the files whose bytes come from the image.
        lanes: per parallel writer, what it writes, in order.
        item_count: number of items over all lanes.
        description: JSON text that describes items and keys for readers; copied into the integrity file as it is.
        checksum: algorithm of the items' checksums.
    """

    files: Sequence[FileSpec]
    lanes: Sequence[Sequence[Lane]]
    item_count: int
    description: str
    checksum: str = "crc32"

    def to_plain(self) -> dict[str, Any]:
        """As plain lists and numbers, for JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> WriteTable:
        """The inverse of `to_plain`."""
        return cls(
            [FileSpec(**spec) for spec in plain["files"]],
            [[Lane(**lane) for lane in lanes] for lanes in plain["lanes"]],
            plain["item_count"],
            plain["description"],
            plain["checksum"],
        )


@dataclass(frozen=True)
class Extra:
    """Bytes that are not in the image, because their length changes from save to save (Python objects).

    `items` are (offset, length) relative to the file, and follow the image's items in the list of checksums.
    """

    file: str
    offset: int
    data: memoryview
    items: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class WriteResult:
    """What one rank wrote: its files with sizes (and the integrity file's CRC), bytes, and seconds."""

    rank: int
    files: list[dict[str, Any]]
    bytes: int
    seconds: float


def run_write_job(
    fs: FsOps,
    folder: str,
    rank: int,
    table: WriteTable,
    source: ByteSource,
    extras: Sequence[Extra],
    block_bytes: int,
    checksum_home: Sequence[str] | None = None,
) -> WriteResult:
    """Write a rank's files into the staging folder, each fsynced, and its integrity file last.

    Args:
        fs: where effects go.
        folder: the staging folder, which exists.
        rank: whose files these are.
        table: what goes where.
        source: the image.
        extras: bytes beside the image; their files come after the image's.
        block_bytes: how many bytes one write call takes.
        checksum_home: where the package of the table's checksum is, for a process without site-packages.

    Raises:
        OSError: the first failure of any parallel writer, after all of them have stopped.
        ChecksumMissingError: the package of the table's checksum is not there.
    """
    started = time.perf_counter()
    checksum = find_checksum(table.checksum, checksum_home)
    tails = {extra.file: extra.offset + extra.data.nbytes for extra in extras}
    descriptors: dict[str, int] = {}
    sizes: dict[str, int] = {}
    sums = [checksum.of(memoryview(b""))] * table.item_count  # what items without bytes keep
    with _closing(fs, descriptors):
        for spec in table.files:
            sizes[spec.name] = max(spec.size, tails.pop(spec.name, 0))
        sizes.update(tails)
        for name, size in sizes.items():
            descriptors[name] = fs.create(os.path.join(folder, name), size)
        _run_lanes(fs, table, source, descriptors, checksum, sums, block_bytes)
        for extra in extras:
            fs.write(descriptors[extra.file], [extra.data], extra.offset)
            for offset, length in extra.items:
                at = offset - extra.offset
                sums.append(checksum.of(extra.data[at : at + length]))
        with ThreadPoolExecutor(max(len(descriptors), 1), thread_name_prefix="ckpt-sync") as pool:
            list(pool.map(fs.sync, descriptors.values()))
    places = [(extra.file, offset, length) for extra in extras for offset, length in extra.items]
    files: list[dict[str, Any]] = [{"name": name, "size": size} for name, size in sizes.items()]
    integrity = b'{"version":1,"rank":%d,"files":%s,"layout":%s,"extras":%s,"checksum":"%s","sums":%s}\n' % (
        rank,
        json.dumps(files, separators=(",", ":")).encode(),
        table.description.encode(),
        json.dumps(places, separators=(",", ":")).encode(),
        table.checksum.encode(),
        json.dumps(sums, separators=(",", ":")).encode(),
    )
    fs.write_new(os.path.join(folder, integrity_name(rank)), integrity)
    fs.sync_folder(folder)
    files.append({"name": integrity_name(rank), "size": len(integrity), "crc32": zlib.crc32(integrity)})
    return WriteResult(rank, files, sum(entry["size"] for entry in files), time.perf_counter() - started)


@contextlib.contextmanager
def _closing(fs: FsOps, descriptors: Mapping[str, int]) -> Iterator[None]:
    """In the end close all that was opened, also when a close fails; the first error counts."""
    failed: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failed = error
    for fd in descriptors.values():
        try:
            fs.close(fd)
        except OSError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _run_lanes(
    fs: FsOps,
    table: WriteTable,
    source: ByteSource,
    descriptors: Mapping[str, int],
    checksum: Checksum,
    sums: list[int],
    block_bytes: int,
) -> None:
    """All parallel writers at once; the first error counts, and the others stop at their next block."""
    failed: list[BaseException] = []

    def run(lanes: Sequence[Lane]) -> None:
        try:
            for lane in lanes:
                _write_lane(fs, table, source, descriptors, checksum, sums, block_bytes, lane, failed)
        except BaseException as error:
            failed.append(error)
            raise

    busy = [lanes for lanes in table.lanes if lanes]
    if len(busy) <= 1:
        for lanes in busy:
            run(lanes)
        return
    with ThreadPoolExecutor(len(busy), thread_name_prefix="ckpt-write") as pool:
        pending = [pool.submit(run, lanes) for lanes in busy]
    if failed:
        raise failed[0]
    for future in pending:
        future.result(timeout=0)


def _write_lane(
    fs: FsOps,
    table: WriteTable,
    source: ByteSource,
    descriptors: Mapping[str, int],
    checksum: Checksum,
    sums: list[int],
    block_bytes: int,
    lane: Lane,
    failed: Sequence[BaseException],
) -> None:
    spec = table.files[lane.file]
    fd = descriptors[spec.name]
    cursor = _SumCursor(lane, checksum, sums)
    position = lane.start
    while position < lane.end and not failed:
        end = min(position + block_bytes, lane.end)
        pieces = source.buffers(spec.base + position, spec.base + end)
        # The checksum is taken from the staged bytes before they are written, so that it also covers the write.
        for piece in pieces:
            cursor.feed(piece)
        fs.write(fd, pieces, position)
        fs.start_writeback(fd, position, end - position)
        position = end


class _SumCursor:
    """Takes the bytes of a lane in order and notes one checksum per item; bytes between items are skipped."""

    def __init__(self, lane: Lane, checksum: Checksum, sums: list[int]) -> None:
        self._items = lane.items
        self._number = lane.first
        self._last = lane.first + len(lane.items)
        self._first = lane.first
        self._position = lane.start
        self._checksum = checksum
        self._sums = sums
        #: Of the item that the last piece ended in.
        self._begun: Stream | None = None

    def feed(self, piece: memoryview) -> None:
        start = self._position
        stop = start + piece.nbytes
        self._position = stop
        number, items, sums, first, of = self._number, self._items, self._sums, self._first, self._checksum.of
        while number < self._last:
            offset, length = items[number - first]
            end = offset + length
            if offset >= start and end <= stop:
                sums[number] = of(piece[offset - start : end - start])
            elif offset >= stop:
                break
            else:
                begun = self._begun = self._begun or self._checksum.stream()
                begun.update(piece[max(offset, start) - start : min(end, stop) - start])
                if end > stop:
                    break
                sums[number] = begun.value()
                self._begun = None
            number += 1
        self._number = number
