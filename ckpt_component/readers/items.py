"""Where the items of a rank lie. Column by column: one by one, many small ones take longer than their bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from ..memory.int_columns import column_of, picked
from .shapes import DTYPES, MOST_DIMENSIONS, MOST_ELEMENTS, is_shape


class StoredItem(NamedTuple):
    """One item: where it is, where its payload of `nbytes` starts in the file, and its checksum.

    `dtype` is None for an object.
    """

    file: str
    offset: int
    length: int
    payload: int
    nbytes: int
    checksum: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorItems:
    """The items of tensors of one rank. All columns have one element for each item; those of numbers are int64.

    Attributes:
        names: files, by number.
        file: number of the file.
        offset: where the item begins in its file.
        length: bytes of the item.
        payload: where the tensor's bytes begin in the file.
        nbytes: how many they are.
        checksums: of the items; up to 64 bits without a sign.
        dtypes, shapes: of the tensors.
    """

    names: Sequence[str]
    file: torch.Tensor
    offset: torch.Tensor
    length: torch.Tensor
    payload: torch.Tensor
    nbytes: torch.Tensor
    checksums: Sequence[int]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.shapes)

    def item(self, number: int) -> StoredItem:
        """One of them."""
        return StoredItem(
            file=self.names[int(self.file[number])],
            offset=int(self.offset[number]),
            length=int(self.length[number]),
            payload=int(self.payload[number]),
            nbytes=int(self.nbytes[number]),
            checksum=self.checksums[number],
            dtype=self.dtypes[number],
            shape=self.shapes[number],
        )


def tensor_items(
    rows: Sequence[Any], checksums: Sequence[int], names: Sequence[str], sizes: Mapping[str, int]
) -> TensorItems:
    """The items of tensors, of rows that a file claims.

    Args:
        rows: file number, offset, length, offset of the payload, dtype, shape.
        checksums: exact ints, one a row.
        names: files, by number.
        sizes: of the files, by name.

    Raises:
        ValueError, TypeError, KeyError, OverflowError, RuntimeError: a row that cannot be true.
    """
    if not rows:
        none = torch.empty(0, dtype=torch.int64)
        return TensorItems(names, none, none, none, none, none, (), (), ())
    files, offsets, lengths, payloads, kinds, shapes = zip(*rows, strict=True)
    dtypes = {kind: _dtype(kind) for kind in set(kinds)}
    forms = list(map(tuple, shapes))
    elements = _elements(forms)
    itemsizes = {kind: dtype.itemsize for kind, dtype in dtypes.items()}
    file, offset, length, payload = map(column, (files, offsets, lengths, payloads))
    itemsize = column(list(map(itemsizes.__getitem__, kinds)))
    # Their product could overflow.
    refuse(elements > length // itemsize, "{} elements do not fit the item at {} of {} bytes", elements, offset, length)
    needed = elements * itemsize
    refuse(file < 0, "it has an item in the file number {}", file)  # an index that is negative counts from the end
    refuse(file >= len(names), "it has an item in the file number {}", file)
    size = picked(column([sizes[name] for name in names]), file)
    refuse((offset < 0) | (length < 0), "it has an item at {} of {} bytes", offset, length)
    # The sums below cannot overflow, because a file has fewer than 2^63 bytes.
    refuse(
        (offset > size) | (length > size - offset),
        "its item at {} of {} bytes ends behind its file of {} bytes",
        *(offset, length, size),
    )
    refuse(
        (payload < offset) | (payload - offset > length - needed),
        "{} bytes at {} do not fit the item at {} of {} bytes",
        *(needed, payload, offset, length),
    )
    kept = list(map(dtypes.__getitem__, kinds))
    return TensorItems(names, file, offset, length, payload, needed, checksums, kept, forms)


def _elements(shapes: Sequence[tuple[Any, ...]]) -> torch.Tensor:
    """How many elements tensors of these shapes have, each a shape that can be."""
    ranks, sizes = list(map(len, shapes)), list(chain.from_iterable(shapes))
    exact = set(map(type, sizes)) <= {int}
    # A size of 0 hides what the others come to.
    if not exact or min(sizes, default=1) < 1 or max(ranks) > MOST_DIMENSIONS:
        for shape in shapes:
            if not is_shape(shape):
                raise ValueError(f"it has an item of the shape {list(shape)!r:.200}")
    counts = list(map(math.prod, shapes))
    if max(counts) >= MOST_ELEMENTS:
        raise ValueError(f"it has an item of the shape {list(shapes[counts.index(max(counts))])!r:.200}")
    return column(counts)


def column(values: Sequence[Any]) -> torch.Tensor:
    """Exact ints of 64 bits, at least one, as a tensor.

    Raises:
        ValueError: something else is among them.
        OverflowError: one has more bits.
    """
    check_ints(values)
    return column_of(values)


def check_ints(values: Sequence[Any]) -> None:
    """Refuse what is no exact int, such as True.

    Raises:
        ValueError: with the first such value.
    """
    if not set(map(type, values)) <= {int}:
        wrong = next(value for value in values if type(value) is not int)
        raise ValueError(f"it has {wrong!r:.200} where a whole number is expected")


def refuse(wrong: torch.Tensor, text: str, *columns: torch.Tensor) -> None:
    """Raise where `wrong` holds.

    Args:
        wrong: of bools.
        text: with a placeholder for each column.
        *columns: they give the first such place's numbers.

    Raises:
        ValueError: `wrong` holds somewhere.
    """
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise ValueError(text.format(*(int(each[first]) for each in columns)))


def _dtype(name: Any) -> torch.dtype:
    found = DTYPES.get(name)
    if found is None:
        raise ValueError(f"it names the dtype {name!r:.200}, which this torch does not have")
    return found
