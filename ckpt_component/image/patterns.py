"""One pickle of `torch.save` as a pattern for all tensors that differ from its own in numbers alone.

The dimensions and the number of elements are all that differs between the pickles of two tensors of one dtype, when
their numbers take as many bytes to write down. Filling them in takes a few microseconds, and `torch.save` two hundred.
Nothing here knows that torch will go on doing so: whoever uses a pattern holds its first work against `torch.save`.
"""

from __future__ import annotations

import itertools
import pickletools
import struct
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

#: Of payloads. Larger ones have their numbers in other fields, of the pickle and of the archive; they are few.
MOST_BYTES = 1 << 31

#: A number in a pickle, by its size.
_BYTE, _TWO_BYTES, _FOUR_BYTES = (
    partial(struct.Struct(layout).pack, code) for layout, code in (("<cB", b"K"), ("<cH", b"M"), ("<ci", b"J"))
)
_NUMBERS = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})


class UnknownPickleError(Exception):
    """A pickle is made in a way that is not known here."""


class Numbers(NamedTuple):
    """The numbers of a tensor that stand in its pickle.

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
        if not 0 < nbytes < MOST_BYTES:
            return None
        strides.reverse()
        # As protocol 2 has them, which `torch.save` uses; none of them is as large as `nbytes` may be.
        pickled = tuple(
            [
                _BYTE(number) if number < 1 << 8 else _TWO_BYTES(number) if number < 1 << 16 else _FOUR_BYTES(number)
                for number in (count, nbytes, 0, *shape, *strides)
            ]
        )
        return cls(nbytes, pickled, (dtype, *map(len, pickled)))


class Pattern:
    """A pickle, and where the numbers stand in it.

    Args:
        pickled: what `torch.save` pickled.
        numbers: of its tensor.

    Attributes:
        proven: whether it gives what `torch.save` pickles for another tensor than its own; None: nobody has looked.
        length: of the pickle, for every tensor of the form.

    Raises:
        UnknownPickleError: a number is not where it should be.
    """

    def __init__(self, pickled: bytes, numbers: Numbers) -> None:
        self.proven: bool | None = None
        self.length = len(pickled)
        places = _places(pickled, numbers)
        #: Which numbers stand in it, in order, and what is before, between and behind them.
        self._numbers = [number for _, number in places]
        self._between = _cut(pickled, [(place, len(numbers.pickled[number])) for place, number in places])

    def fill_in(self, numbers: Numbers) -> bytes:
        """The pickle of another tensor of the same form."""
        parts, pickled = self._between.copy(), numbers.pickled
        parts[1::2] = [pickled[number] for number in self._numbers]
        return b"".join(parts)


def _cut(data: bytes, places: Sequence[tuple[int, int]]) -> list[bytes]:
    """What is before, between and behind (place, bytes), and at these what is there."""
    ends = [0, *(edge for place, width in places for edge in (place, place + width)), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def _places(pickled: bytes, numbers: Numbers) -> list[tuple[int, int]]:
    """(place in the pickle, number of the pickled one), in order."""
    try:
        operations = list(pickletools.genops(pickled))
    except ValueError as error:
        raise UnknownPickleError(f"it cannot be read: {error}") from error
    places = [position for operation, _, position in operations if operation.name in _NUMBERS and position is not None]
    elements, nbytes, *rest = range(len(numbers.pickled))
    for storage in (elements, nbytes):  # newer dtypes lie in a storage without a type, which counts in bytes
        wanted = [storage, *rest]
        if len(places) == len(wanted) and all(
            pickled.startswith(numbers.pickled[number], place) for place, number in zip(places, wanted, strict=True)
        ):
            return list(zip(places, wanted, strict=True))
    raise UnknownPickleError("it has other numbers than the tensor")
