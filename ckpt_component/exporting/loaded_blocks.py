"""The bytes of tensors of checkpoints that only torch can read: one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..formats import Entry, Index
from ..formats.open_source import open_source
from ..formats.source import Access, Request
from ..state import objects
from ..state.tensors import tensor_bytes
from .blocks import BLOCK_BYTES, TensorBlocks


class LoadedBlocks(TensorBlocks):
    """Reads tensors as a load does, for checkpoints of other programs and files of `torch.save`.

    Args:
        index: the checkpoint
    """

    def __init__(self, index: Index) -> None:
        super().__init__(index, ())
        self._source = open_source(index, Access(index.storage.open_files))

    def of(self, entry: Entry) -> Iterator[memoryview]:
        """As `TensorBlocks.of`; one whole tensor is in memory."""
        value = torch.empty(entry.shape, dtype=self._source.dtype_of(entry), device="cpu")
        self._source.read_tensors([Request.into(entry.key, value)])
        data = tensor_bytes(value)
        for start in range(0, len(data), BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]

    def item(self, entry: Entry) -> bytes:
        """As `TensorBlocks.item`."""
        value = self._source.read_objects([entry.key])[entry.key]
        return objects.dump(objects.encode(value, entry.key))
