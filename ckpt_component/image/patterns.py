"""One archive of `torch.save` as a pattern for all tensors that differ from its own in numbers alone.

The dimensions in the pickle, the size of the payload and the offsets behind it are all that differs between the
archives of two tensors of one dtype, when their numbers take as many bytes to write down and their payloads end at the
same place of an aligned block. Filling them in takes a few microseconds, and `torch.save` two hundred. Nothing here
knows that torch will go on doing so: whoever uses a pattern holds its first work against `torch.save`.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
_NUMBERS = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})


class UnknownArchiveError(Exception):
    """An archive is laid out in a way that is not known here."""


@dataclass(frozen=True)
class Numbers:
    """The numbers of a tensor that stand in its archive.

    Attributes:
        nbytes: of the payload.
        pickled: elements, bytes, offset, sizes and strides, each as the pickle has it.
    """

    nbytes: int
    pickled: tuple[bytes, ...]

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
        return cls(nbytes, tuple(map(_pickled, (count, nbytes, 0, *shape, *reversed(strides)))))

    def form(self, dtype: torch.dtype) -> tuple[object, ...]:
        """Equal for two tensors that one pattern serves."""
        return dtype, self.nbytes % _ALIGNMENT, *map(len, self.pickled)


class Pattern:
    """An archive, and where the numbers stand in it.

    Args:
        prefix: what is before the payload.
        suffix: what is after it.
        numbers: of its tensor.

    Attributes:
        proven: whether it gives what `torch.save` writes for another tensor than its own; None: nobody has looked.

    Raises:
        UnknownArchiveError: a number is not where it should be.
    """

    def __init__(self, prefix: bytes, suffix: bytes, numbers: Numbers) -> None:
        self.proven: bool | None = None
        self._prefix = prefix
        self._suffix = suffix
        self._nbytes = numbers.nbytes
        self._pickled = _places_in_pickle(prefix, numbers)
        try:
            #: Places in the suffix where the payload's size stands.
            self._sizes: list[int] = []
            #: (place in the suffix, bytes that it takes, what stands there): offsets of what follows the payload.
            self._offsets: list[tuple[int, int, int]] = []
            self._find_in_suffix()
        except struct.error as error:
            raise UnknownArchiveError("the archive ends early") from error

    def fill_in(self, numbers: Numbers) -> tuple[bytes, bytes]:
        """Prefix and suffix of another tensor of the same form."""
        prefix, suffix = bytearray(self._prefix), bytearray(self._suffix)
        for place, number in self._pickled:
            data = numbers.pickled[number]
            prefix[place : place + len(data)] = data
        size, longer = numbers.nbytes.to_bytes(4, "little"), numbers.nbytes - self._nbytes
        for place in self._sizes:
            suffix[place : place + 4] = size
        for place, width, offset in self._offsets:
            suffix[place : place + width] = (offset + longer).to_bytes(width, "little")
        return bytes(prefix), bytes(suffix)

    def _find_in_suffix(self) -> None:
        suffix, payload_end = self._suffix, len(self._prefix) + self._nbytes
        _, _, *sizes = _unpack(_DESCRIPTOR, suffix, 0, b"PK\x07\x08")
        if sizes != [self._nbytes, self._nbytes]:
            raise UnknownArchiveError("the payload's size does not follow it")
        self._sizes += [8, 12]
        end = len(suffix) - _END.size
        central = _unpack(_END, suffix, end, b"PK\x05\x06")[6]
        locator = end - _LOCATOR.size
        end64 = _unpack(_LOCATOR, suffix, locator, b"PK\x06\x07")[2]
        if _unpack(_END64, suffix, end64 - payload_end, b"PK\x06\x06")[9] != central:
            raise UnknownArchiveError("it has two directories")
        self._offsets += [(end + 16, 4, central), (locator + 8, 8, end64), (end64 - payload_end + 48, 8, central)]
        position = central - payload_end
        while position < end64 - payload_end:
            fields = _unpack(_CENTRAL, suffix, position, b"PK\x01\x02")
            name_at = position + _CENTRAL.size
            if suffix[name_at : name_at + fields[10]].endswith(b"/data/0"):
                self._sizes += [position + 20, position + 24]
            elif fields[16] >= payload_end:
                self._offsets.append((position + 42, 4, fields[16]))
            position = name_at + sum(fields[10:13])


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


@lru_cache(maxsize=4096)
def _pickled(number: int) -> bytes:
    """As protocol 2 has it, which `torch.save` uses: without the protocol before and the stop behind it."""
    return pickle.dumps(number, 2)[2:-1]
