"""`FileSums`: the checksums of a file's items, taken when it was kept; a copy of the file is compared with them."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple


class FileSums(NamedTuple):
    """What is known of the bytes of a file.

    Attributes:
        algorithm: of the items' checksums
        places: offset, length, offset, length, and so on, ascending, in 64 bits each
        values: the checksums
    """

    algorithm: str
    places: array[int]
    values: array[int]


def sum_between(places: array[int], length: int, read: Callable[[int, int], Iterator[bytes | memoryview]]) -> int:
    """The CRC-32 of the bytes of a file that belong to no item.

    Args:
        places: of the items, as `FileSums` has them
        length: of the file
        read: returns the bytes from one offset to another, in pieces
    """
    position = value = 0
    for offset, end in [
        *zip(places[::2], map(sum, zip(places[::2], places[1::2], strict=True)), strict=True),
        (length,) * 2,
    ]:
        if offset > position:
            for piece in read(position, offset):
                value = zlib.crc32(piece, value)
        position = max(position, end)
    return value
