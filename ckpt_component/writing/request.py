"""One rank's part of one save: what has to be written, and where. Standard library alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from ..options import ResolvedTimeouts
from ..storage.file_system import file_system
from ..storage.fs import FsOps
from ..storage.names import Attempt
from .range_writer import ByteSource, Lane


@dataclass(frozen=True)
class FileSpec:
    """One file of the image: its name, where its bytes start in the image, and how many there are."""

    name: str
    base: int
    size: int


@dataclass(frozen=True)
class WriteTable:
    """The constant part of a rank's jobs: it is sent to the writer process once per structure.

    Attributes:
        number: another one for every table.
        files: the files whose bytes come from the image.
        lanes: per parallel writer, what it writes, in order.
        item_count: number of items over all lanes.
        description: JSON text that describes items and keys for readers; copied into the integrity file as it is.
        checksum: algorithm of the items' checksums.
    """

    number: int
    files: Sequence[FileSpec]
    lanes: Sequence[Sequence[Lane]]
    item_count: int
    description: bytes | memoryview
    checksum: str = "crc32"

    def to_parts(self) -> tuple[dict[str, Any], list[bytes | memoryview]]:
        """As plain values for JSON, and what is too much for that: as bytes, not copied."""
        places = [lane.places.cast("B") for group in self.lanes for lane in group]
        plain = {
            "number": self.number,
            "files": [vars(spec) for spec in self.files],
            "lanes": [[[lane.file, lane.start, lane.end, lane.first] for lane in group] for group in self.lanes],
            "item_count": self.item_count,
            "checksum": self.checksum,
            "sizes": [len(self.description), *(data.nbytes for data in places)],
        }
        return plain, [self.description, *places]

    @classmethod
    def from_parts(cls, plain: Mapping[str, Any], parts: Sequence[memoryview]) -> WriteTable:
        """The inverse of `to_parts`; `parts` have the sizes that stand in `plain`, and are not copied."""
        description, *places = parts
        lists = iter([data.cast("Q") for data in places])
        return cls(
            plain["number"],
            [FileSpec(**spec) for spec in plain["files"]],
            [
                [Lane(file, start, end, first, next(lists)) for file, start, end, first in lanes]
                for lanes in plain["lanes"]
            ],
            plain["item_count"],
            description,
            plain["checksum"],
        )


@dataclass(frozen=True)
class ObjectBlob:
    """Bytes that are not in the image, because their length changes from save to save: encoded Python objects.

    `items` are (offset, length) relative to the file, and follow the image's items in the list of checksums.
    """

    file: str
    offset: int
    data: memoryview
    items: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class EncodedSave:
    """Everything of one save besides the arena's bytes.

    Attributes:
        table: the constant part; another one only when it had to change.
        object_blobs: the encoded objects of this save.
        rank_index: makes, as JSON values for `Writer.index`, where everything of this rank stands. It belongs to the
            table, takes more memory than that, and is asked for once per table.
    """

    table: WriteTable
    object_blobs: Sequence[ObjectBlob] = ()
    rank_index: Callable[[], dict[str, Any]] = dict

    @property
    def file_bytes(self) -> int:
        """About how many bytes all files of this save take on disk, those that describe it included."""
        # The integrity file has the description and a number per item, and a rank's index says about the same again.
        total = 2 * len(self.table.description) + 12 * self.table.item_count
        for file in self.table.files:
            total += file.size
        for blob in self.object_blobs:
            total += blob.data.nbytes
        return total


@dataclass(frozen=True)
class WriteOptions:
    """How a writer writes.

    Attributes:
        block_bytes: how many bytes one write call takes.
        io: `buffered`, `direct` (past the page cache), or `auto`: whichever is faster in this folder.
        max_bytes_per_second: for all parallel writers of a rank together; None: no limit.
    """

    block_bytes: int = 8 << 20
    io: str = "auto"
    max_bytes_per_second: float | None = None


class WriteResult(TypedDict):
    """What one rank wrote, as JSON values.

    Attributes:
        rank: this one.
        files: names and sizes, and the CRC of the integrity file.
        bytes: of all files.
        seconds: how long it took.
        io: how it was written, for the next request in this folder; `auto` where that was not tried out.
    """

    rank: int
    files: list[dict[str, Any]]
    bytes: int
    seconds: float
    io: str


@dataclass(frozen=True)
class WriteRequest:
    """Write one complete snapshot into the staging folder of an attempt.

    Attributes:
        fs: where effects go; another process makes its own with the same properties.
        attempt: target and staging folder.
        rank: whose files these are.
        world_size: how many ranks write.
        table: the constant part, alike for all saves of a structure.
        object_blobs: the encoded objects of this save.
        source: the image's bytes; an `Arena` for a caller in another process.
        options: how to write.
        manifest_fields: plain values for the manifest.
        timeouts: for how long the writer process waits for other ranks where the trainers have died.
        sidecars: files that the commit adds, such as `.metadata`; on rank 0, whose writer process commits when the
            trainers have died.
    """

    fs: FsOps
    attempt: Attempt
    rank: int
    world_size: int
    table: WriteTable
    object_blobs: Sequence[ObjectBlob]
    source: ByteSource
    options: WriteOptions
    manifest_fields: Mapping[str, Any]
    timeouts: ResolvedTimeouts
    sidecars: Mapping[str, bytes] | None = None

    def to_parts(self) -> tuple[dict[str, Any], list[memoryview]]:
        """As JSON values, and the bytes of the blobs; the table, the sidecars and the image are sent by themselves."""
        blobs, parts = [], []
        for blob in self.object_blobs:
            blobs.append([blob.file, blob.offset, blob.data.nbytes, list(blob.items)])
            parts.append(blob.data)
        plain = {
            "attempt": asdict(self.attempt),
            "rank": self.rank,
            "world_size": self.world_size,
            "durable": self.fs.durable,
            "options": asdict(self.options),
            "manifest_fields": dict(self.manifest_fields),
            "timeouts": asdict(self.timeouts),
            "blobs": blobs,
        }
        return plain, parts

    @classmethod
    def from_parts(
        cls, plain: Mapping[str, Any], table: WriteTable, blob_bytes: memoryview, source: ByteSource
    ) -> WriteRequest:
        """The inverse of `to_parts`, in the writer process, with what was sent by itself."""
        blobs = []
        for file, offset, size, items in plain["blobs"]:
            blobs.append(ObjectBlob(file, offset, blob_bytes[:size], items))
            blob_bytes = blob_bytes[size:]
        attempt = Attempt(**plain["attempt"])
        return cls(
            fs=file_system(durable=plain["durable"], atomic_rename=attempt.by_rename, process="writer"),
            attempt=attempt,
            rank=plain["rank"],
            world_size=plain["world_size"],
            table=table,
            object_blobs=blobs,
            source=source,
            options=WriteOptions(**plain["options"]),
            manifest_fields=plain["manifest_fields"],
            timeouts=ResolvedTimeouts(**plain["timeouts"]),
        )
