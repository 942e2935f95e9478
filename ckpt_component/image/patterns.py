"""One archive of `torch.save` as a pattern for all tensors that differ from its own in numbers alone.

The dimensions in the pickle, the size of the payload and the offsets behind it are all that differs between the
archives of two tensors of one dtype, when their numbers take as many bytes to write down and their payloads end at the
same place of an aligned block. Filling them in takes a few microseconds, and `torch.save` two hundred. Nothing here
knows that torch will go on doing so: whoever uses a pattern holds its first work against `torch.save`.
"""

from __future__ import annotations

import itertools
import pickletools
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

#: torch aligns records to this, so the padding of what follows the payload depends on where that ends.
_ALIGNMENT = 64
#: Larger ones have other zip fields; they are few.
_MOST_BYTES = 1 << 31

_LOCAL_HEADER_BYTES = 30
_DESCRIPTOR = struct.Struct("<4s3L")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
#: A number in a pickle, by its size.
_BYTE, _TWO_BYTES, _FOUR_BYTES = (
    partial(struct.Struct(layout).pack, code) for layout, code in (("<cB", b"K"), ("<cH", b"M"), ("<ci", b"J"))
)
_NUMBERS = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})


class UnknownArchiveError(Exception):
    """An archive is laid out in a way that is not known here."""


class Numbers(NamedTuple):
    """The numbers of a tensor that stand in its archive.

    Attributes:
        nbytes: of the payload.
        pickled: elements, bytes, offset, sizes and strides, each as the pickle has it.
        form: equal for two tensors that one pattern serves.
    """

    nbytes: int
    pickled: tuple[bytes, ...]
    form: tuple[object, ...]

    @classmethod
    def of(cls, dtype: torch.dtype, shape: Sequence[int]) -> Numbers | None:
        """Those of a contiguous tensor; None where there is no pattern: it is empty, or has gigabytes."""
        strides, count = [], 1
        for size in reversed(shape):
            strides.append(count)
            count *= size
        nbytes = count * dtype.itemsize
        if not 0 < nbytes < _MOST_BYTES:
            return None
        strides.reverse()
        # As protocol 2 has them, which `torch.save` uses; none of them is as large as `nbytes` may be.
        pickled = tuple(
            [
                _BYTE(number) if number < 1 << 8 else _TWO_BYTES(number) if number < 1 << 16 else _FOUR_BYTES(number)
                for number in (count, nbytes, 0, *shape, *strides)
            ]
        )
        return cls(nbytes, pickled, (dtype, nbytes % _ALIGNMENT, *map(len, pickled)))


class Pattern:
    """An archive, and where the numbers stand in it.

    Args:
        prefix: what is before the payload.
        suffix: what is after it.
        numbers: of its tensor.

    Attributes:
        proven: whether it gives what `torch.save` writes for another tensor than its own; None: nobody has looked.
        lengths: of prefix and suffix, for every tensor of the form.

    Raises:
        UnknownArchiveError: a number is not where it should be.
    """

    def __init__(self, prefix: bytes, suffix: bytes, numbers: Numbers) -> None:
        self.proven: bool | None = None
        self.lengths = (len(prefix), len(suffix))
        self._suffix = suffix
        self._payload_end = len(prefix) + numbers.nbytes
        self._nbytes = numbers.nbytes
        places = sorted(_places_in_pickle(prefix, numbers))
        #: Which numbers stand in the prefix, in order, and what is before, between and behind them.
        self._pickled = [number for _, number in places]
        self._between_pickled = _cut(prefix, [(place, len(numbers.pickled[number])) for place, number in places])
        try:
            found = sorted(self._find_in_suffix())
        except struct.error as error:
            raise UnknownArchiveError("the archive ends early") from error
        #: How the numbers in the suffix are written, what they are (an offset, or None: the payload's size), and what
        #: is before, between and behind them.
        self._widths = [width for _, width, _ in found]
        self._offsets = [offset for _, _, offset in found]
        self._between_offsets = _cut(suffix, [(place, width) for place, width, _ in found])

    def fill_in(self, numbers: Numbers) -> tuple[bytes, bytes]:
        """Prefix and suffix of another tensor of the same form."""
        prefix, pickled = self._between_pickled.copy(), numbers.pickled
        prefix[1::2] = [pickled[number] for number in self._pickled]
        suffix, size, longer = self._between_offsets.copy(), numbers.nbytes, numbers.nbytes - self._nbytes
        suffix[1::2] = [
            (size if offset is None else offset + longer).to_bytes(width, "little")
            for offset, width in zip(self._offsets, self._widths, strict=True)
        ]
        return b"".join(prefix), b"".join(suffix)

    def _find_in_suffix(self) -> Iterator[tuple[int, int, int | None]]:
        """(place, bytes that it takes, what stands there) of offsets of what follows the payload; None: its size."""
        suffix, payload_end = self._suffix, self._payload_end
        _, _, *sizes = _unpack(_DESCRIPTOR, suffix, 0, b"PK\x07\x08")
        if sizes != [self._nbytes, self._nbytes]:
            raise UnknownArchiveError("the payload's size does not follow it")
        yield from ((8, 4, None), (12, 4, None))
        end = len(suffix) - _END.size
        central = _unpack(_END, suffix, end, b"PK\x05\x06")[6]
        locator = end - _LOCATOR.size
        end64 = _unpack(_LOCATOR, suffix, locator, b"PK\x06\x07")[2]
        if _unpack(_END64, suffix, end64 - payload_end, b"PK\x06\x06")[9] != central:
            raise UnknownArchiveError("it has two directories")
        yield from ((end + 16, 4, central), (locator + 8, 8, end64), (end64 - payload_end + 48, 8, central))
        position = central - payload_end
        while position < end64 - payload_end:
            fields = _unpack(_CENTRAL, suffix, position, b"PK\x01\x02")
            name_at = position + _CENTRAL.size
            if suffix[name_at : name_at + fields[10]].endswith(b"/data/0"):
                yield from ((position + 20, 4, None), (position + 24, 4, None))
            elif fields[16] >= payload_end:
                yield position + 42, 4, fields[16]
            position = name_at + sum(fields[10:13])


def _cut(data: bytes, places: Sequence[tuple[int, int]]) -> list[bytes]:
    """What is before, between and behind (place, bytes), and at these what is there."""
    ends = [0, *(edge for place, width in places for edge in (place, place + width)), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def _places_in_pickle(prefix: bytes, numbers: Numbers) -> list[tuple[int, int]]:
    """(place in the prefix, number of the pickled one)."""
    name_length, extra_length = struct.unpack_from("<2H", prefix, _LOCAL_HEADER_BYTES - 4)
    start = _LOCAL_HEADER_BYTES + name_length + extra_length
    if not prefix[_LOCAL_HEADER_BYTES : _LOCAL_HEADER_BYTES + name_length].endswith(b"/data.pkl"):
        raise UnknownArchiveError("the pickle is not the first record")
    try:
        operations = list(pickletools.genops(prefix[start:]))
    except ValueError as error:
        raise UnknownArchiveError(f"the pickle cannot be read ({error})") from error
    places = [
        start + position for operation, _, position in operations if operation.name in _NUMBERS and position is not None
    ]
    elements, nbytes, *rest = range(len(numbers.pickled))
    for storage in (elements, nbytes):  # newer dtypes lie in a storage without a type, which counts in bytes
        wanted = [storage, *rest]
        if len(places) == len(wanted) and all(
            prefix.startswith(numbers.pickled[number], place) for place, number in zip(places, wanted, strict=True)
        ):
            return list(zip(places, wanted, strict=True))
    raise UnknownArchiveError("the pickle has other numbers than the tensor")


def _unpack(layout: struct.Struct, data: bytes, position: int, signature: bytes) -> tuple[int, ...]:
    if position < 0:
        raise UnknownArchiveError("an offset leads out of the archive")
    found, *rest = layout.unpack_from(data, position)
    if found != signature:
        raise UnknownArchiveError(f"no {signature!r} at {position}")
    return 0, *rest
