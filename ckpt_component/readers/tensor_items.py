"""The tensor items of one rank as columns of torch, for reads of many at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from ..catalogue.rank_index import ItemColumns
from ..memory.int_columns import column_of

#: By the name after `torch.`. Names from a file are looked up here: attributes of torch can import modules.
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
#: Bytes of one element of the dtypes that this torch has.
WIDTHS = {name: dtype.itemsize for name, dtype in DTYPES.items()}


class TensorItems:
    """The tensor items of one rank.

    Args:
        columns: The items.

    Attributes:
        dtypes: Dtypes of the tensors.
    """

    def __init__(self, columns: ItemColumns) -> None:
        self.columns = columns
        self.dtypes: Sequence[torch.dtype] = list(map(DTYPES.__getitem__, columns.dtypes))

    @cached_property
    def table(self) -> torch.Tensor:
        """int64, one column per item; its rows are the file's number, offset, length, payload and nbytes."""
        columns = self.columns
        rows = (columns.files, columns.offsets, columns.lengths, columns.payloads, columns.nbytes)
        numbers = [number for row in rows for number in row]
        return column_of(numbers).view(len(rows), len(columns.offsets))
