"""A write table: what is the same in all write requests of a rank, as long as its state has one structure.

Standard library only.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
