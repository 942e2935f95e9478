"""A write request: what one rank writes in one save, and where. Standard library only."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypedDict

from ..commit.protocol import Attempt
from ..commit.protocols import attempt_here
from ..options import ResolvedTimeouts
from ..outside import Outside
from ..storage.locate import storage_at
from ..storage.storage import Held, Storage


@dataclass(frozen=True)
class Extent:
    """A range for one parallel writer: bytes [start, end) of a file, and the items in it.

    Attributes:
        file: its number in the table
        start: offset of the first byte
        end: offset after the last byte
        first: number of the first item among all items
        places: offsets and lengths of the items, packed by `places_of`
    """

    file: int
    start: int
    end: int
    first: int
    places: memoryview


def places_of(items: Iterable[tuple[int, int]]) -> memoryview:
    """Pack the ascending offsets and the lengths of items in a file; tuples would take ten times the memory.

    Args:
        items: (offset, length) of each

    Returns:
        64-bit integers: offset, length, offset, length, and so on.
    """
    return memoryview(array("Q", itertools.chain.from_iterable(items)))


@dataclass(frozen=True)
class FileSpec:
    """One file of the image: its name, where its bytes start in the image, and its size."""

    name: str
    base: int
    size: int


@dataclass(frozen=True)
class WriteTable:
    """The constant part of a rank's requests, sent to the writer process once per structure.

    Attributes:
        number: unique to the table
        files: the files whose bytes come from the image
        extents: what each parallel writer writes, in order
        item_count: number of items in all extents
        description: JSON text that describes items and keys for readers; copied unchanged into the integrity file
        checksum: algorithm of the items' checksums
    """

    number: int
    files: Sequence[FileSpec]
    extents: Sequence[Sequence[Extent]]
    item_count: int
    description: bytes | memoryview
    checksum: str = "crc32"

    def items_of(self, file: int) -> list[int]:
        """Numbers of a file's items."""
        extents = [extent for group in self.extents for extent in group if extent.file == file]
        return [extent.first + place for extent in extents for place in range(len(extent.places) // 2)]

    def to_parts(self) -> tuple[dict[str, Any], list[bytes | memoryview]]:
        """Return plain values for JSON, and the large parts as bytes, not copied."""
        places = [extent.places.cast("B") for group in self.extents for extent in group]
        plain = {
            "number": self.number,
            "files": [vars(spec) for spec in self.files],
            "extents": [
                [[extent.file, extent.start, extent.end, extent.first] for extent in group] for group in self.extents
            ],
            "item_count": self.item_count,
            "checksum": self.checksum,
            "sizes": [len(self.description), *(data.nbytes for data in places)],
        }
        return plain, [self.description, *places]

    @classmethod
    def from_parts(cls, plain: Mapping[str, Any], parts: Sequence[memoryview]) -> WriteTable:
        """The inverse of `to_parts`; `parts` have the sizes listed in `plain` and are not copied."""
        description, *places = parts
        lists = iter([data.cast("Q") for data in places])
        return cls(
            plain["number"],
            [FileSpec(**spec) for spec in plain["files"]],
            [
                [Extent(file, start, end, first, next(lists)) for file, start, end, first in extents]
                for extents in plain["extents"]
            ],
            plain["item_count"],
            description,
            plain["checksum"],
        )


class ByteSource(Protocol):
    """Where the bytes of an image come from: an arena, or the live tensors.

    Attributes:
        lasting: whether the pieces are in memory that does not change until the save has ended
    """

    lasting: bool

    @property
    def nbytes(self) -> int:
        """Size of the image."""
        ...

    def buffers(self, start: int, end: int, *, whole: bool = False) -> list[memoryview]:
        """Return bytes [start, end) of the image as one or more pieces, in order.

        The pieces stay valid during the next call by the same thread, and no longer, unless they are `lasting`.

        Args:
            start: a page boundary, if `whole`
            end: may be past the end of the image, within its last page
            whole: return one piece, page-aligned in memory
        """
        ...


@dataclass(frozen=True)
class ObjectBlob:
    """Encoded Python objects, which are not in the image because their length changes from save to save.

    `items` are (offset, length) pairs relative to the file; their checksums follow those of the image's items.
    `sums_at` are the positions in `data` of 4-byte fields that take the checksums of the first items of the image.
    """

    file: str
    offset: int
    data: memoryview
    items: Sequence[tuple[int, int]]
    sums_at: Sequence[int] = ()

    def filled(self, sums: Sequence[int]) -> memoryview:
        """The data with the checksums of the image's items in it."""
        if not self.sums_at:
            return self.data
        data = bytearray(self.data)
        for position, value in zip(self.sums_at, sums, strict=False):
            data[position : position + 4] = value.to_bytes(4, "little")
        return memoryview(data)


@dataclass(frozen=True)
class ReusedFile:
    """A file of the table that an earlier checkpoint has with the same bytes, so that it is shared and not written.

    Attributes:
        file: its number in the table
        held: from `Storage.hold`
        sums: the checksums of its items, in order
    """

    file: int
    held: Held
    sums: Sequence[int]


@dataclass(frozen=True)
class EncodedSave:
    """Everything that one save writes except the arena's bytes.

    Attributes:
        table: the constant part; a new one only when it had to change
        object_blobs: the encoded objects of this save
        rank_index: returns, as JSON values for `Writer.index`, where each item of this rank is stored. Called once per
            table; the index is not kept, because it takes more memory than the table.
    """

    table: WriteTable
    object_blobs: Sequence[ObjectBlob] = ()
    rank_index: Callable[[], dict[str, Any]] = dict

    @property
    def item_count(self) -> int:
        """Number of tensors and objects."""
        count = self.table.item_count
        for blob in self.object_blobs:
            count += len(blob.items)
        return count

    @property
    def file_bytes(self) -> int:
        """Approximate size on disk of all files of this save, including those that describe it."""
        # The integrity file has the description and a number per item; a rank's index is about as large.
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
        block_bytes: bytes per write call
        io: `buffered`, `direct` (bypassing the page cache), or `auto`: whichever is faster in this folder
        max_bytes_per_second: for all parallel writers of a rank together; None: no limit
    """

    block_bytes: int = 8 << 20
    io: str = "auto"
    max_bytes_per_second: float | None = None


class WriteResult(TypedDict):
    """What one rank wrote, as JSON values.

    Attributes:
        rank: this rank
        files: names and sizes, and the CRC of the integrity file
        bytes: total size of the files
        seconds: how long the write took
        began: when it began (`time.perf_counter`, which all processes of a host share)
        synced_from: when the data was in the files and their sync began
        io: mode of the write, for the next request in this folder; `auto` if no trial was made
        sums: checksums of the items of each file in `WriteRequest.kept`, in order
        shared: size of the files that are shared with an earlier checkpoint, which `bytes` does not count
        copied: numbers of those that had to be copied instead; `bytes` counts them
    """

    rank: int
    files: list[dict[str, Any]]
    bytes: int
    seconds: float
    began: float
    synced_from: float
    io: str
    sums: list[list[int]]
    shared: int
    copied: list[int]


@dataclass(frozen=True)
class WriteRequest:
    """Write one complete snapshot into the staging folder of an attempt.

    Attributes:
        fs: file system operations; another process makes its own with the same properties
        attempt: target and staging folder
        rank: this rank
        world_size: number of ranks
        table: the constant part, the same for all saves of a structure
        object_blobs: the encoded objects of this save
        source: the image's bytes; an `Arena` if another process writes
        options: how to write
        manifest_fields: plain values for the manifest
        timeouts: how long the writer process waits for other ranks after the trainers have died
        sidecars: files that the commit adds, such as `.metadata`; only on rank 0, whose writer process commits if
            the trainers die
        shared: files that are not written, because an earlier checkpoint has them
        kept: numbers of the files that later checkpoints may share, so that their checksums are returned
        sees_all: whether the files of all ranks can be seen from here, so that the writer process can commit
    """

    fs: Storage
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
    shared: Sequence[ReusedFile] = ()
    kept: Sequence[int] = ()
    sees_all: bool = True

    def to_parts(self) -> tuple[dict[str, Any], list[memoryview]]:
        """Return JSON values and the bytes of the blobs.

        The table, the sidecars, the image, and the descriptors of shared files are sent separately.
        """
        blobs, parts = [], []
        for blob in self.object_blobs:
            blobs.append([blob.file, blob.offset, blob.data.nbytes, list(blob.items), list(blob.sums_at)])
            parts.append(blob.data)
        plain = {
            "attempt": self.attempt.to_plain(),
            "rank": self.rank,
            "world_size": self.world_size,
            "durable": self.fs.durable,
            "atomic_rename": self.fs.atomic_rename,
            "storage_options": dict(self.fs.options),
            "storage_home": self.fs.home,
            "options": asdict(self.options),
            "manifest_fields": dict(self.manifest_fields),
            "timeouts": asdict(self.timeouts),
            "blobs": blobs,
            "shared": [
                [each.file, each.held if isinstance(each.held, str) else None, list(each.sums)] for each in self.shared
            ],
            "kept": list(self.kept),
            "sees_all": self.sees_all,
        }
        return plain, parts

    @classmethod
    def from_parts(
        cls,
        plain: Mapping[str, Any],
        fs: Storage,
        table: WriteTable,
        blob_bytes: memoryview,
        source: ByteSource,
        held: Sequence[int] = (),
    ) -> WriteRequest:
        """The inverse of `to_parts`, in the writer process, given `storage_in` and what was sent separately."""
        blobs, descriptors = [], iter(held)
        for file, offset, size, items, sums_at in plain["blobs"]:
            blobs.append(ObjectBlob(file, offset, blob_bytes[:size], items, sums_at))
            blob_bytes = blob_bytes[size:]
        return cls(
            fs=fs,
            attempt=attempt_here(fs, plain["attempt"]),
            rank=plain["rank"],
            world_size=plain["world_size"],
            table=table,
            object_blobs=blobs,
            source=source,
            options=WriteOptions(**plain["options"]),
            manifest_fields=plain["manifest_fields"],
            timeouts=ResolvedTimeouts(**plain["timeouts"]),
            shared=[
                ReusedFile(file, next(descriptors) if path is None else path, sums)
                for file, path, sums in plain["shared"]
            ],
            kept=plain["kept"],
            sees_all=plain["sees_all"],
        )


def storage_in(plain: Mapping[str, Any], outside: Outside) -> Storage:
    """The storage of a request from `to_parts`, made in the writer process, which runs in an outside."""
    if outside.storage_of is not None:
        storage: Storage = outside.storage_of(plain["attempt"]["target"])
        return storage
    storage = storage_at(
        plain["attempt"]["target"],
        durable=plain["durable"],
        atomic_rename=plain["atomic_rename"],
        options=plain["storage_options"],
        home=plain["storage_home"],
        process="writer",
    )
    storage.outside = outside
    return storage
