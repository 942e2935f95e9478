"""Columns of integers, one for each of many tensors, handled by one thread.

Some of torch's operations, such as `column[numbers]`, wake all of its threads for a few thousand numbers, which takes
longer than the operation.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch

Row = TypeVar("Row", bound=tuple[Any, ...])


def rows_of(kind: type[Row], *columns: Iterable[Any]) -> Iterator[Row]:
    """Named tuples of columns, one for each field; faster than their own constructor, which is Python."""
    return map(partial(tuple.__new__, kind), zip(*columns, strict=False))


def column_of(values: Iterable[int]) -> torch.Tensor:
    """Integers below 2^63 as a column, int64; faster than `torch.tensor`.

    Raises:
        OverflowError: one has more bits.
        TypeError: one is no integer.
    """
    numbers = array("q", values)
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)
